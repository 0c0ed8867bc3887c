"""A forward of tokens that do not stand side by side gives what one forward of all gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GPTJForCausalLM

from rag_kvcache.model.arena import Arena
from rag_kvcache.model.attention import Watched, can_be_watched, watched_attention
from rag_kvcache.model.guard import lock_of
from rag_kvcache.model.language_model import LanguageModel
from rag_kvcache.model.rope import find_rope
from tests.tiny import tiny_model

MOVABLE = [
    "llama", "llama3_rope", "llama_yarn", "qwen2", "qwen3", "mistral_window8", "gemma2", "gemma3",
    "phi3_longrope", "gpt_neox", "mixtral", "qwen3_moe",
]  # fmt: skip
# Older transformers give GPT-J an attention of its own, which cannot be watched.
GPTJ_DISPATCHES = bool(getattr(GPTJForCausalLM, "_supports_attention_backend", False))
MOVABLE += ["gptj"] * GPTJ_DISPATCHES
TOKENS = 60
IDS = np.random.default_rng(3).integers(3, 500, TOKENS)


def plain(lm: LanguageModel, tokens: int = 8) -> tuple[list[int], torch.Tensor, Arena]:
    """Greedy ids, the scores of each, and the arena of an ordinary run."""
    return run(lm, lm.new_arena(TOKENS + tokens), tokens)


def run(lm: LanguageModel, arena: Arena, tokens: int = 8) -> tuple[list[int], torch.Tensor, Arena]:
    scores: list[torch.Tensor] = []
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    head = lm.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda m, i, out: scores.append(out[0, -1].detach().clone()))
    ids: list[int] = []
    with lm.lock:
        lm.generate(IDS, arena, config, None, lambda token: ids.append(token) or False)
    hook.remove()
    return ids, torch.stack(scores), arena


def with_holes(lm: LanguageModel, filled: Arena, holes: list[int]) -> Arena:
    """An arena with all of ``filled`` but for the holes, in which stands rubbish."""
    arena = lm.new_arena(TOKENS + 8)
    arena.place(filled.take(0, TOKENS), TOKENS)
    for layer in range(lm.geometry.layers if lm.geometry else 0):
        for t in arena.layer(layer):
            t[:, holes] = 1e3
    arena.await_slots(torch.tensor(holes), TOKENS)
    return arena


@pytest.mark.parametrize("family", MOVABLE)
@pytest.mark.parametrize("holes", [[59], [3, 17, 18, 40, 57, 58, 59], [*range(2, 59, 3), 59]])
def test_holes_are_filled_as_if_all_had_been_computed(family: str, holes: list[int]) -> None:
    lm = LanguageModel(tiny_model(family))
    assert can_be_watched(lm.model)
    ids, scores, filled = plain(lm)
    got, got_scores, arena = run(lm, with_holes(lm, filled, holes))
    assert got == ids
    assert (got_scores - scores).abs().max() < 1e-4
    for a, b in zip(arena.take(0, TOKENS), filled.take(0, TOKENS), strict=True):
        assert (a - b).abs().max() < 1e-3
    assert arena.awaited is None


def test_logits_processors_see_the_prompt_in_its_order() -> None:
    lm = LanguageModel(tiny_model("llama"))
    config = GenerationConfig(
        max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0, repetition_penalty=1.5
    )

    def answer(arena: Arena) -> list[int]:
        ids: list[int] = []
        with lm.lock:
            lm.generate(IDS, arena, config, None, lambda token: ids.append(token) or False)
        return ids

    first = lm.new_arena(TOKENS + 8)
    expected = answer(first)
    assert answer(with_holes(lm, first, [5, 30, 59])) == expected


@pytest.mark.parametrize("family", MOVABLE)
@pytest.mark.parametrize("distance", [0, 13, -7])
def test_moved_placement_turns_the_keys_while_copying(family: str, distance: int) -> None:
    lm = LanguageModel(tiny_model(family))
    with lock_of(lm.model):
        rotations = find_rope(lm.model).rotations
    assert rotations is not None
    _, _, filled = plain(lm)
    stored, arena = filled.take(10, 40), lm.new_arena(TOKENS)
    before = [p.clone() for p in stored]
    arena.place_moved(stored, first=4, at=20, tokens=20, distance=distance, rotations=rotations)
    for layer, rotation in enumerate(rotations):
        keys, values = filled.layer(layer)
        expected = torch.empty_like(keys[:, 14:34])
        rotation.turn_into(expected, keys[:, 14:34], distance)
        placed_keys, placed_values = arena.layer(layer)
        assert torch.equal(placed_keys[:, 20:40], expected)
        assert torch.equal(placed_values[:, 20:40], values[:, 14:34])
    assert all(torch.equal(a, b) for a, b in zip(before, stored, strict=True))


def test_a_listener_gets_every_layers_queries_and_may_end_the_run() -> None:
    lm = LanguageModel(tiny_model("llama"))

    class Enough(Exception):
        pass

    heard: list[tuple[int, Any]] = []

    def listen(layer: int, query: torch.Tensor, scaling: float | None) -> None:
        heard.append((layer, tuple(query.shape)))
        if layer == 1:
            raise Enough

    before = lm.model.config._attn_implementation
    with pytest.raises(Enough), watched_attention(lm.model, Watched(listen=listen)):
        lm.model(torch.from_numpy(IDS)[None])
    assert heard == [(0, (1, 4, TOKENS, 8)), (1, (1, 4, TOKENS, 8))]
    assert lm.model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["falcon_alibi", "bloom"] + ["gptj"] * (not GPTJ_DISPATCHES))
def test_families_with_attention_of_their_own_cannot_be_watched(family: str) -> None:
    assert not can_be_watched(tiny_model(family))
