"""Attention recomputed from queries and keys is the model's own; the choice takes the best."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rag_kvcache.blend.score import Asked, attention_paid, highest, telling_layers
from rag_kvcache.model.attention import Watched, watched_attention
from rag_kvcache.model.compat import cache_keyword
from rag_kvcache.model.language_model import LanguageModel
from tests.tiny import tiny_model

TOKENS, ASKING = 40, 5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "llama_yarn"])
def test_it_is_the_attention_the_model_pays(family: str) -> None:
    lm = LanguageModel(tiny_model(family))
    ids = np.random.default_rng(0).integers(3, 500, TOKENS)
    arena, heard = lm.new_arena(TOKENS), {}

    def listen(layer: int, query: torch.Tensor, scaling: float | None) -> None:
        heard[layer] = Asked(query[:, :, -ASKING:].clone(), scaling)

    with lm.lock, torch.no_grad(), watched_attention(lm.model, Watched(listen=listen)):
        lm.model(torch.from_numpy(ids)[None], use_cache=True, **{cache_keyword(): arena.cache})
    eager = tiny_model(family)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = eager(torch.from_numpy(ids)[None], output_attentions=True).attentions
    for layers in [(0,), (1, 2)]:
        expected = torch.stack([attentions[i][0, :, -ASKING:] for i in layers]).mean(dim=(0, 1, 2))
        got = attention_paid(arena, {i: heard[i] for i in layers}, TOKENS)
        assert (got - expected).abs().max() < 1e-5
        assert got.sum() == pytest.approx(1, abs=1e-5)


def test_the_best_scored_share_is_chosen() -> None:
    scores = torch.tensor([9.0, 1, 5, 2, 8, 3, 7, 4])
    among = torch.tensor([1, 2, 3, 5, 6, 7])
    assert highest(scores, among, 0).tolist() == []
    assert highest(scores, among, 1 / 3).tolist() == [2, 6]
    assert highest(scores, among, 0.01).tolist() == [6]
    assert highest(scores, among, 1.0).tolist() == among.tolist()
    assert highest(torch.zeros(8), among, 0.5).tolist() == [1, 2, 3]


def test_layers_are_those_in_the_middle_that_see_everything() -> None:
    assert telling_layers(30) == (12, 13, 14)
    assert telling_layers(3) == (1,)
    assert telling_layers(1) == (0,)
    assert telling_layers(30, full=(5, 11, 17, 23, 29)) == (11,)
    assert telling_layers(30, full=(5, 13, 17)) == (13,)
