"""Re-positioning of cached keys: turns them from the position they were computed at to another.

Rotary position embeddings (RoFormer, arXiv 2104.09864) turn each pair of a key's dimensions by an angle
proportional to its position, so a key moves by turning it by the difference. Scaled variants (linear, YaRN,
Llama-3) only choose other frequencies; a factor on the keys (YaRN) is in them already and stays.

Which frequencies and which pairing a layer uses is not read from the family's name but found out: a few
tokens are run at two places, and the rotation that carries a layer's keys from one to the other is its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rag_kvcache.model.compat import cache_of
from rag_kvcache.model.guard import evaluating, rope_restored
from rag_kvcache.model.probe import kv_layers
from rag_kvcache.model.rotation import Rotation
from rag_kvcache.model.support import context_window, exact_limit

_TRIAL_TOKENS = 8
_TRIAL_DISTANCE = 89  # far enough to tell all but the slowest frequencies apart, prime
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_TOLERANCE = 3e-2  # relative; a key has 8 (bf16) to 11 (fp16) significant bits, sines are rounded too


@dataclass(frozen=True)
class Rope:
    """rotations: one per layer; None when the model's keys cannot be moved, for ``reason``."""

    rotations: tuple[Rotation, ...] | None
    reason: str


def find_rope(model: PreTrainedModel) -> Rope:
    """Find out how each layer's keys depend on their position. Two forwards of 8 tokens.

    Contract: hold the model's lock (``guard.lock_of``); hooks stand on it meanwhile, and go afterwards.

    Frequencies that depend on the sequence's length (dynamic NTK, longrope) are those of short sequences:
    ``support.exact_limit`` says up to where these hold.
    """
    if not _takes_positions(model):
        return Rope(None, "the model takes no positions (ALiBi)")
    reach = min(context_window(model.config, 1 << 20), exact_limit(model.config) or 1 << 20)
    distance = min(_TRIAL_DISTANCE, reach - _TRIAL_TOKENS - 1)
    if distance < 1:
        return Rope(None, f"the context window of {reach} tokens is too short to try")
    inputs = _Inputs()
    with ExitStack() as hooks:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                hook = module.register_forward_pre_hook(inputs, with_kwargs=True)
                hooks.callback(hook.remove)
        here, there = _kv_at(model, 0), _kv_at(model, distance)
    if here is None or there is None:
        return Rope(None, "the model keeps state other than keys and values")
    if inputs.depend_on_position or not all(_same(v, w) for (_, v), (_, w) in zip(here, there, strict=True)):
        return Rope(None, "values depend on the position (learned positions): cannot be moved")
    candidates = [Rotation(), *_candidates(model)]
    found = []
    for (keys, _), (expected, _) in zip(here, there, strict=True):
        errors = [_error(rotation, keys, expected, distance) for rotation in candidates]
        best = min(errors)
        if not best <= _tolerance(keys):
            return Rope(None, "keys depend on the position in an unknown way")
        found.append(candidates[errors.index(best)])
    return Rope(tuple(found), "keys carried over when tried at construction")


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model, behind peft's wrapper (*args, **kwargs) if it has one, can be told positions."""
    unwrap: Any = getattr(model, "get_base_model", lambda: model)
    return "position_ids" in inspect.signature(unwrap().forward).parameters


class _Inputs:
    """A hook on attention modules: on the second run each gets what went in on the first.

    So that a layer's keys differ by their position alone. Else the rounding of the layers before adds up: in
    half precision the last layers of SmolLM2-135M differ by as much as they are large.
    """

    def __init__(self) -> None:
        self._first: dict[nn.Module, torch.Tensor] = {}
        self.depend_on_position = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(given, torch.Tensor):
            return args, kwargs
        first = self._first.setdefault(module, given)
        if not _same(first, given) and module is next(iter(self._first)):
            self.depend_on_position = True  # nothing but the embedding is before this one
        return ((first, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": first})


def _kv_at(model: PreTrainedModel, start: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Keys and values per layer, each [1, heads, tokens, dim], of a few tokens at positions ``start`` ..

    None when the model keeps anything else.
    """
    ids = torch.arange(1, _TRIAL_TOKENS + 1, device=model.device).unsqueeze(0)
    positions = torch.arange(start, start + _TRIAL_TOKENS, device=model.device).unsqueeze(0)
    with evaluating(model), rope_restored(model):
        return kv_layers(cache_of(model(input_ids=ids, position_ids=positions, use_cache=True)))


def _candidates(model: PreTrainedModel) -> Iterator[Rotation]:
    """The rotations that the model's buffers hint at."""
    seen = set()
    for module in model.modules():
        # Gemma 3 has one buffer per layer type: full_attention_inv_freq, sliding_attention_inv_freq.
        for name, buffer in module._buffers.items():
            if buffer is not None and name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
                seen.add(tuple(buffer.double().cpu().tolist()))
    # GPT-J and its kin keep a table of sines instead, one row per position: row 1 has the frequencies.
    for module in model.modules():
        table = getattr(module, "embed_positions", None)
        if isinstance(table, torch.Tensor) and table.dim() == 2 and table.shape[1] % 2 == 0:
            sin, cos = table[1].double().cpu().chunk(2)
            seen.add(tuple(torch.atan2(sin, cos).tolist()))
    for frequencies in sorted(seen):
        yield Rotation(frequencies)
        yield Rotation(frequencies, interleaved=True)


def _error(rotation: Rotation, keys: torch.Tensor, expected: torch.Tensor, distance: int) -> float:
    """Largest relative error of a pair of dimensions (root mean square over heads and tokens).

    By pair, not by the largest key: some models have a few dimensions a hundred times larger than the rest,
    next to which a wrong rotation of all others would pass.
    """
    if 2 * len(rotation.frequencies) > keys.shape[-1]:
        return float("inf")
    moved = torch.empty_like(keys)
    rotation.turn_into(moved, keys, distance)
    wrong = rotation.sizes(moved.double() - expected.double())
    return float((wrong / rotation.sizes(expected.double()).clamp(min=1e-9)).max())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= _tolerance(a) * b.abs().max().clamp(min=1e-6))


def _tolerance(t: torch.Tensor) -> float:
    return _TOLERANCE.get(t.dtype, _HALF_TOLERANCE)
