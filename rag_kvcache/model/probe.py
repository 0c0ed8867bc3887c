"""Finds out at construction whether, and how, a model's KV can be cut by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rag_kvcache.model.arena import Arena, Geometry
from rag_kvcache.model.compat import cache_keyword, cache_of
from rag_kvcache.model.guard import evaluating
from rag_kvcache.model.support import FAMILIES

_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Probed:
    """geometry: the KV shapes; None when exact reuse is refused, for ``reason``."""

    geometry: Geometry | None
    reason: str


def probe(model: PreTrainedModel) -> Probed:
    """Look at the cache the model fills, and try families that nobody has vouched for.

    A family in the support table is taken at its word. Any other runs 8 tokens at once and in two pieces
    through an arena; the logits must agree.
    """
    family = FAMILIES.get(model.config.get_text_config(decoder=True).model_type)
    if family is not None and not family.exact:
        return Probed(None, family.reason)
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(a, "is_prompt_learning", False) for a in adapters.values()):
        return Probed(None, "prompt-tuning adapters put tokens of their own before the prompt")
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=model.device).unsqueeze(0)
    with evaluating(model):
        whole = model(input_ids=ids, use_cache=True)
        layers = kv_layers(cache_of(whole))
        if layers is None:
            return Probed(None, "the model keeps state that cannot be cut by token")
        geometry = Geometry.of(layers)
        if family is not None:
            return Probed(geometry, family.reason)
        return _tried(model, ids, whole.logits[0, -1], geometry)


def kv_layers(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Each layer's keys and values [1, heads, tokens, dim]; None for a cache of anything else."""
    layers = [_keys_and_values(layer) for layer in getattr(cache, "layers", [])]
    found = [kv for kv in layers if kv is not None]
    return found if found and len(found) == len(layers) else None


def _keys_and_values(layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A layer's keys and values [1, heads, tokens, dim]; None when it holds anything else, or more."""
    plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
    if not plain or layer.keys is None or layer.keys.dim() != 4:
        return None
    return layer.keys, layer.values


def _tried(model: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor, geometry: Geometry) -> Probed:
    arena = Arena(geometry, ids.shape[1])
    name = cache_keyword()
    half = ids.shape[1] // 2
    model(input_ids=ids[:, :half], use_cache=True, **{name: arena.cache})
    got = model(input_ids=ids[:, half:], use_cache=True, **{name: arena.cache}).logits[0, -1]
    # Relative to the logits' own size: half precision models agree to about three digits.
    tolerance = 1e-3 if expected.dtype == torch.float32 else 5e-2
    if (got - expected).abs().max() > tolerance * expected.abs().max().clamp(min=1):
        return Probed(None, "the model continues differently from a cached prefix")
    return Probed(geometry, "not in the support table; agreed when tried at construction")
