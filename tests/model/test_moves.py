"""Which models' KV can be moved, and what is said of those whose cannot."""

from __future__ import annotations

import pytest
import torch

from rag_kvcache.model import moves
from rag_kvcache.model.attention import Watched
from rag_kvcache.model.guard import lock_of
from rag_kvcache.model.language_model import LanguageModel
from rag_kvcache.model.moves import Moves, find_moves
from tests.model.test_scatter import MOVABLE
from tests.tiny import tiny_model


def found(family: str, dtype: torch.dtype = torch.float32) -> Moves:
    lm = LanguageModel(tiny_model(family).to(dtype))
    assert lm.geometry is not None
    with lock_of(lm.model):
        return find_moves(lm.model, lm.geometry)


@pytest.mark.parametrize("family", MOVABLE)
def test_rope_families_can_be_moved(family: str) -> None:
    tried = found(family)
    assert tried.rotations is not None, tried.reason
    assert all(rotation.frequencies for rotation in tried.rotations)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_in_half_precision_too(family: str, dtype: torch.dtype) -> None:
    tried = found(family, dtype)
    assert tried.rotations is not None, tried.reason


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt2", "learned positions"),
        ("bloom", "cannot be told where"),
        ("falcon_alibi", "cannot be told where"),
    ],
)
def test_others_say_why_not(family: str, why: str) -> None:
    tried = found(family)
    assert tried.rotations is None
    assert why in tried.reason


def test_a_model_that_masks_by_its_own_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if its attention asked nobody where the tokens stand.
    monkeypatch.setattr(moves, "Watched", lambda positions: Watched())
    tried = found("llama")
    assert (tried.rotations, tried.reason) == (None, "it fills gaps differently from a whole run")


def test_a_model_that_raises_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> bool:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(moves, "_fills_gaps", broken)
    assert "no such luck" in found("llama").reason
