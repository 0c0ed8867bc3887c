"""Attention of a few new tokens on a long cache, without copying the cache.

transformers' ``sdpa`` repeats the keys and values of grouped-query models once per query head when there is
a mask, which for a short question on a long context costs more than the attention itself. Here the query
heads that share a KV head are laid out as further queries of that head instead (as transformers does for a
single token): the same sums over the same numbers, and the cache is read where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "rag_kvcache_sdpa"
_MAX_QUERIES = 128  # from here on repeating the mask costs more than repeating keys and values


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


# The mask function goes under the same name: without one transformers would hand out no mask at all.
AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def faster_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use ``grouped_attention`` inside the block where the model dispatches to ``sdpa`` by name.

    Other implementations, and families with attention classes of their own (Falcon), are left alone.
    """
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation_internal
    if before != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        yield
        return
    config._attn_implementation_internal = NAME  # not the property: it would set nested configs too
    try:
        yield
    finally:
        config._attn_implementation_internal = before
