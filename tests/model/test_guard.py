"""The guard: one lock per model object, and training flags put back as they were."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest
import torch
from torch import nn

from rag_kvcache.model.guard import evaluating, lock_of
from rag_kvcache.model.language_model import LanguageModel
from tests.tiny import tiny_model


class TestEvaluating:
    @pytest.fixture
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
        model.train()
        model[1].eval()  # as when a part is frozen
        return model

    def flags(self, model: nn.Module) -> list[bool]:
        return [m.training for m in model.modules()]

    def test_turns_training_off_and_back_on_where_it_was_on(self, model: nn.Module) -> None:
        before = self.flags(model)
        assert set(before) == {True, False}
        with evaluating(model):
            assert not any(self.flags(model))
        assert self.flags(model) == before

    def test_puts_back_when_something_fails(self, model: nn.Module) -> None:
        before = self.flags(model)
        with pytest.raises(ZeroDivisionError), evaluating(model):
            1 / 0  # noqa: B018
        assert self.flags(model) == before

    def test_computes_without_grad(self, model: nn.Module) -> None:
        with evaluating(model):
            assert model(torch.ones(1, 2)).grad_fn is None
        assert torch.is_grad_enabled()

    def test_makes_ordinary_tensors_inside_inference_mode(self, model: nn.Module) -> None:
        with torch.inference_mode(), evaluating(model):
            assert not torch.ones(1).is_inference()

    def test_leaves_a_model_in_eval_mode_alone(self, model: nn.Module) -> None:
        model.eval()
        with evaluating(model):
            pass
        assert not any(self.flags(model))


class TestLock:
    def test_is_shared_by_all_wrappers_of_one_model(self) -> None:
        model = tiny_model()
        assert LanguageModel(model).lock is LanguageModel(model).lock

    def test_is_its_own_for_another_model(self) -> None:
        assert lock_of(nn.Linear(1, 1)) is not lock_of(nn.Linear(1, 1))

    def test_is_the_same_from_all_threads(self) -> None:
        model = nn.Linear(1, 1)
        with ThreadPoolExecutor(8) as pool:
            locks = list(pool.map(lambda _: lock_of(model), range(64)))
        assert len(set(map(id, locks))) == 1

    def test_keeps_no_model_alive(self) -> None:
        model = nn.Linear(1, 1)
        gone = ref(model)
        lock_of(model)
        del model
        gc.collect()
        assert gone() is None

    def test_leaves_no_mark_on_the_model(self) -> None:
        model = nn.Linear(1, 1)
        before = set(vars(model))
        lock_of(model)
        assert set(vars(model)) == before
