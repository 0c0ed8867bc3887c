"""How decoding is chosen, and that one request's choices touch nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rag_kvcache.errors import RequestError
from rag_kvcache.model.language_model import Decoding, LanguageModel
from tests.tiny import tiny_model

IDS = np.arange(3, 23)


def tokens(lm: LanguageModel, decoding: Decoding, stop_after: int = 99) -> list[int]:
    seen: list[int] = []

    def take(token: int) -> bool:
        seen.append(token)
        return len(seen) >= stop_after

    arena = lm.new_arena(len(IDS) + decoding.max_new_tokens)
    lm.generate(IDS, arena, lm.generation_config(decoding), decoding.seed, take)
    return seen


def test_nothing_given_leaves_the_models_own_config_in_charge() -> None:
    model = tiny_model()
    model.generation_config.update(do_sample=True, temperature=0.3, top_p=0.8, max_length=7)
    config = LanguageModel(model).generation_config(Decoding(5))
    assert (config.do_sample, config.temperature, config.top_p) == (True, 0.3, 0.8)
    assert (config.max_new_tokens, config.max_length) == (5, None)
    assert model.generation_config.max_length == 7


@pytest.mark.parametrize(
    ("decoding", "expected"),
    [
        (Decoding(5, temperature=0), {"do_sample": False}),
        (Decoding(5, temperature=0.7), {"do_sample": True, "temperature": 0.7}),
        (Decoding(5, top_p=0.5), {"do_sample": True, "top_p": 0.5}),
        (Decoding(5, temperature=0, top_p=0.5), {"do_sample": False}),
        (Decoding(5, temperature=0.7, extra={"temperature": 0.1}), {"temperature": 0.7}),
        (Decoding(5, extra={"repetition_penalty": 1.2}), {"repetition_penalty": 1.2}),
    ],
)
def test_what_is_given_wins(decoding: Decoding, expected: dict[str, Any]) -> None:
    config = LanguageModel(tiny_model()).generation_config(decoding)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "extra", [{"no_such": 1}, {"max_new_tokens": 3}, {"num_return_sequences": 2}, {"eos_token_id": "x"}]
)
def test_wrong_settings_raise(extra: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        LanguageModel(tiny_model()).generation_config(Decoding(5, extra=extra))


@pytest.mark.parametrize(
    ("extra", "continues"),
    [
        ({}, True),
        ({"do_sample": True}, True),
        ({"num_beams": 2}, False),
        ({"prompt_lookup_num_tokens": 3}, False),
        ({"use_cache": False}, False),
    ],
)
def test_which_ways_of_decoding_continue_a_cache(extra: dict[str, Any], continues: bool) -> None:
    lm = LanguageModel(tiny_model())
    assert lm.can_continue(lm.generation_config(Decoding(5, extra=extra))) is continues


def test_a_seed_reproduces_and_leaves_torchs_random_state_alone() -> None:
    lm = LanguageModel(tiny_model())
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = tokens(lm, Decoding(8, temperature=1.0, seed=3))
    assert torch.equal(torch.rand(1), expected)
    assert first == tokens(lm, Decoding(8, temperature=1.0, seed=3))
    assert first != tokens(lm, Decoding(8, temperature=1.0, seed=4))


def test_saying_stop_ends_in_the_same_step() -> None:
    assert len(tokens(LanguageModel(tiny_model()), Decoding(20), stop_after=3)) == 3


def test_a_returned_arenas_memory_is_used_again_and_its_content_is_not() -> None:
    lm = LanguageModel(tiny_model())
    first = lm.new_arena(40)
    lm.prefill(IDS, first)
    address = first.memory[0].data_ptr()
    assert lm.new_arena(40).memory[0].data_ptr() != address, "in use"
    lm.give_back(first)
    second = lm.new_arena(30)
    assert second.memory[0].data_ptr() == address
    assert second.length == 0
    lm.give_back(second)
    assert lm.new_arena(5000).capacity >= 5000
    large = lm.new_arena(20_000)
    lm.give_back(large)
    assert lm.new_arena(40).capacity < large.capacity, "a long prompt's memory does not stay for ever"
