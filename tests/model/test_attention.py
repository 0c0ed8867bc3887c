"""Attention on a long cache equals transformers' own, and the model's config is put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rag_kvcache.model.attention import NAME, faster_attention, grouped_attention
from tests.tiny import tiny_model


class Grouped(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = True


def causal(queries: int, tokens: int, *, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    seen = torch.arange(tokens)[None] <= torch.arange(tokens - queries, tokens)[:, None]
    if dtype == torch.bool:
        return seen[None, None]
    return torch.zeros(queries, tokens, dtype=dtype).masked_fill(~seen, float("-inf"))[None, None]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("queries", "tokens"), [(1, 40), (2, 40), (33, 90), (128, 200), (129, 200), (40, 40)]
)
@pytest.mark.parametrize("mask", [torch.bool, torch.float32, None])
def test_it_equals_transformers_sdpa(
    groups: int, queries: int, tokens: int, mask: torch.dtype | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2 * groups, queries, 8, generator=generator)
    # As in an arena: a part of something longer, not contiguous.
    key, value = (torch.randn(1, 2, 300, 8, generator=generator)[:, :, :tokens] for _ in range(2))
    given = None if mask is None else causal(queries, tokens, dtype=mask)
    module = Grouped(groups)
    expected, _ = sdpa_attention_forward(module, query, key, value, given, scaling=0.3)
    got, _ = grouped_attention(module, query, key, value, given, scaling=0.3)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_the_config_is_put_back_also_when_generating_fails() -> None:
    model = tiny_model()

    def failing() -> None:
        with faster_attention(model):
            assert model.config._attn_implementation == NAME
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        failing()
    assert model.config._attn_implementation == "sdpa"


def test_another_implementation_is_left_alone() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    with faster_attention(model):
        assert model.config._attn_implementation == "eager"
