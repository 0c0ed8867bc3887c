"""Attention of a few new tokens on a long cache, without copying the cache.

transformers' ``sdpa`` repeats the keys and values of grouped-query models once per query head when there is
a mask, which for a short question on a long context costs more than the attention itself. Here the query
heads that share a KV head are laid out as further queries of that head instead (as transformers does for a
single token): the same sums over the same numbers, and the cache is read where it lies.

The same registered functions let a forward compute tokens that do not stand side by side (``Watched``): the
mask asks where a query stands instead of counting from the cache's length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

NAME = "rag_kvcache_sdpa"
EAGER_NAME = "rag_kvcache_eager"
_OURS = {"sdpa": NAME, "eager": EAGER_NAME}
_MAX_QUERIES = 128  # from here on repeating the mask costs more than repeating keys and values


Listener = Callable[[int, torch.Tensor, float | None], None]
"""Gets a layer's index, its queries [1, heads, queries, dim] with positions applied, and the factor of its
scores (None: ``dim ** -0.5``). May raise to end the run."""


@dataclass(frozen=True)
class Watched:
    """What the forwards inside ``watched_attention`` do beside computing.

    positions: the positions [queries] of the coming forward's tokens, None when they follow the cache.
    listen: called by every layer before it attends.
    """

    positions: Callable[[], torch.Tensor | None] = lambda: None
    listen: Listener | None = None


_PLAIN = Watched()
# A context variable: transformers hands a mask or attention function nothing of ours.
_WATCHED: ContextVar[Watched] = ContextVar("rag_kvcache_watched", default=_PLAIN)


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function for ``sdpa``, faster where few queries meet many keys.

    query: [batch, heads, queries, dim]; key, value: [batch, kv_heads, tokens, dim]; attention_mask:
    [batch, 1, queries, tokens] or None. Returns [batch, queries, heads, dim].
    """
    _tell(module, query, scaling)
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    plain = dropout == 0.0 and kwargs.get("position_bias") is None
    if (
        groups == 1
        or attention_mask is None
        or attention_mask.shape[1] != 1
        or queries > _MAX_QUERIES
        or not plain
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    folded = query.reshape(batch, key.shape[1], groups * queries, query.shape[3])
    out = scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask.repeat(1, 1, groups, 1), scale=scaling
    )
    return out.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


def eager_attention(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The eager attention of the model's own file (soft-capped scores of Gemma 2 and the like)."""
    _tell(module, query, kwargs.get("scaling"))
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, *args, **kwargs)


def _tell(module: nn.Module, query: torch.Tensor, scaling: float | None) -> None:
    listen = _WATCHED.get().listen
    if listen is not None:
        listen(int(module.layer_idx), query, scaling)  # type: ignore[arg-type]


def _positioned(make: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """A mask function that knows where the queries of a scattered forward stand.

    Windows and layer types come out right by themselves, as they are functions of positions.
    """

    def positioned(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        positions = _WATCHED.get().positions()
        if positions is None:
            return make(*args, **kwargs)
        sees, offset = kwargs.get("mask_function", causal_mask_function), kwargs.get("q_offset", 0)
        where = positions.to(kwargs.get("device", positions.device))

        def at_positions(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return sees(batch, head, where[query - offset], key)

        return make(*args, **{**kwargs, "mask_function": at_positions, "allow_is_causal_skip": False})

    return positioned


# The mask function goes under the same name: without one transformers would hand out no mask at all.
AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, _positioned(sdpa_mask))
AttentionInterface.register(EAGER_NAME, eager_attention)
AttentionMaskInterface.register(EAGER_NAME, _positioned(eager_mask))


def can_be_watched(model: PreTrainedModel) -> bool:
    """Whether the model dispatches its attention by name to one that ``watched_attention`` replaces."""
    config = model.config.get_text_config(decoder=True)
    return config._attn_implementation_internal in _OURS and bool(
        getattr(model, "_supports_attention_backend", False)
    )


@contextmanager
def faster_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use ``grouped_attention`` inside the block where the model dispatches to ``sdpa`` by name.

    Other implementations, and families with attention classes of their own (Falcon), are left alone.
    """
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation_internal != "sdpa" or not can_be_watched(model):
        yield
        return
    with watched_attention(model, _PLAIN):
        yield


@contextmanager
def watched_attention(model: PreTrainedModel, watched: Watched) -> Iterator[None]:
    """Forwards inside the block obey ``watched``. Contract: ``can_be_watched(model)``."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation_internal
    # Not the property: it would set nested configs too.
    config._attn_implementation_internal = _OURS[str(before)]
    token = _WATCHED.set(watched)
    try:
        yield
    finally:
        _WATCHED.reset(token)
        config._attn_implementation_internal = before
