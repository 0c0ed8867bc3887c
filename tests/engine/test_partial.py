"""Documents reused behind other text: what is moved, repaired, stored, and how near the answer comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rag_kvcache import Document, Engine
from rag_kvcache.engine.moving import overlap
from rag_kvcache.errors import ConfigurationError, RequestError
from rag_kvcache.gate import AlwaysGate, SbertGate
from tests.engine.helpers import entries
from tests.model.test_scatter import MOVABLE
from tests.tiny import tiny_model, tiny_tokenizer

HEAD = "You are a helpful shop assistant. Context:\n\n"
A = Document("The kettle holds 1.7 litres and boils in four minutes. " * 2, id="a")
B = Document("Return any item within 30 days, with the receipt. " * 2, id="b")
C = Document("Shipping is free above 50 euros, in two days. " * 2, id="c")
Q1, Q2 = "How long does the kettle take?", "What does shipping cost?"
VECTORS = {"How": [1.0, 0.0], "What": [0.0, 1.0]}


def embed(text: str) -> np.ndarray[Any, Any]:
    return np.array(VECTORS.get(text.split()[0], [0.6, 0.8]))


def make(reuse: str = "gated", family: str = "llama", **settings: Any) -> Engine:
    gate = SbertGate(embed=embed) if reuse == "gated" else None
    return Engine(tiny_model(family), tiny_tokenizer(), gate=gate, reuse=reuse, **settings)


def prompt(*documents: Document, question: str = Q1) -> str:
    return HEAD + "\n\n".join(d.text for d in documents) + f"\n\nQuestion: {question} Answer:"


def ask(engine: Engine, *documents: Document, question: str = Q1, **options: Any) -> Any:
    return engine.generate(
        prompt(*documents, question=question),
        documents=documents,
        question=question,
        temperature=0,
        **{"max_new_tokens": 8, "generate_kwargs": {"eos_token_id": None}, **options},
    )


def learn_each_alone(engine: Engine, *documents: Document, question: str = Q1) -> None:
    """Canonical entries of all documents, and a question on each."""
    for document in documents:
        ask(engine, document, question=question)


def logits(engine: Engine, act: Any) -> torch.Tensor:
    """Of the answer's first token."""
    seen: list[torch.Tensor] = []
    head = engine.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda m, i, out: seen.append(out[0, -1].detach().clone()))
    act()
    hook.remove()
    return seen[0]


class TestMoving:
    def test_a_document_behind_another_is_moved_when_a_similar_question_was_asked(self) -> None:
        engine = make()
        learn_each_alone(engine, A, B)
        report = ask(engine, A, B).report
        a, b = report.of_kind("document")
        assert (a.outcome, a.reused, a.moved_by) == ("hit", a.tokens, None)
        assert (b.outcome, b.reason) == ("moved", "moved")
        assert b.moved_by == a.tokens + 2 or b.moved_by > 0
        assert 0 < b.recomputed == b.tokens - b.reused
        assert (report.gate, report.similarity, report.repair) == ("passed", pytest.approx(1), "profile")
        assert report.reason == "moved"
        assert not report.exact
        assert report.reused_tokens + report.prefilled_tokens == report.prompt_tokens

    def test_another_question_is_answered_exactly(self) -> None:
        engine = make()
        learn_each_alone(engine, A, B)
        got = ask(engine, A, B, question=Q2)
        assert (got.report.gate, got.report.repair, got.report.exact) == ("different", None, True)
        assert [s.reason for s in got.report.of_kind("document")] == ["exact_prefix", "not_allowed"]
        assert got.token_ids == ask(engine, A, B, question=Q2, reuse="off").token_ids

    def test_always_needs_no_gate(self) -> None:
        engine = make("always")
        learn_each_alone(engine, A, B, C)
        report = ask(engine, C, A, B, question=Q2).report
        assert [s.outcome for s in report.of_kind("document")] == ["hit", "moved", "moved"]
        assert (report.gate, report.repair) == (None, "two_pass")

    def test_the_third_request_equals_the_first(self) -> None:
        engine = make("always")
        learn_each_alone(engine, A, B)
        before = {e.key: [p.clone() for p in e.planes] for e in entries(engine)}
        first = ask(engine, B, A)
        ask(engine, C, B, question=Q2)
        third = ask(engine, B, A)
        assert third.token_ids == first.token_ids
        for entry in entries(engine):
            for now, then in zip(entry.planes, before.get(entry.key, ()), strict=False):
                assert torch.equal(now, then)

    def test_nothing_computed_behind_moved_tokens_is_stored(self) -> None:
        engine = make("always")
        learn_each_alone(engine, A)
        kept = {e.key for e in entries(engine)}
        report = ask(engine, B, A, C).report
        assert [s.reason for s in report.of_kind("document")] == ["first_seen", "moved", "behind_moved"]
        new = [e for e in entries(engine) if e.key not in kept]
        assert [e.documents[-1].label for e in new if e.kind == "document"] == ["b"]

    def test_an_entry_computed_behind_other_documents_is_never_moved(self) -> None:
        engine = make("always")
        ask(engine, A, B)
        report = ask(engine, B, A).report
        assert [s.outcome for s in report.of_kind("document")] == [
            "built",
            "moved",
        ]  # A came first, B did not

    @pytest.mark.parametrize("family", MOVABLE)
    def test_computing_all_anew_is_the_uncached_answer(self, family: str) -> None:
        engine = make("always", family, recompute_share=1.0)
        learn_each_alone(engine, A, B, C)
        cold = logits(engine, lambda: ask(engine, B, C, A, reuse="off"))
        got = logits(engine, lambda: ask(engine, B, C, A))
        assert (got - cold).abs().max() < 1e-4
        report = ask(engine, B, C, A).report
        assert report.recomputed_tokens > 20
        assert ask(engine, B, C, A).token_ids == ask(engine, B, C, A, reuse="off").token_ids

    @pytest.mark.parametrize("repair", ["none", "first_k", "deviation", "profile", "two_pass"])
    def test_every_method_repairs_what_it_says(self, repair: str) -> None:
        engine = make("always", repair=repair, recompute_share=0.25)
        learn_each_alone(engine, A, B, C)
        report = ask(engine, A, B, C).report
        moved = sum(s.tokens for s in report.of_kind("document") if s.moved_by is not None)
        assert report.repair == repair
        expected = {"none": 0, "first_k": 32}.get(repair, -(-moved // 4))
        assert abs(report.recomputed_tokens - expected) <= 1

    def test_repair_brings_the_answer_nearer(self) -> None:
        """Random weights attend almost evenly, so only large shares tell."""
        distances = []
        for share in (0.0, 0.9, 1.0):
            engine = make("always", recompute_share=share)
            learn_each_alone(engine, A, B, C)
            cold = logits(engine, lambda: ask(engine, C, B, A, reuse="off"))  # noqa: B023
            got = logits(engine, lambda: ask(engine, C, B, A))  # noqa: B023
            distances.append(float((got - cold).abs().max()))
        assert distances[0] > distances[1] > distances[2]

    def test_a_document_at_the_prompts_end_still_has_its_last_token_computed(self) -> None:
        engine = make("always")
        learn_each_alone(engine, A, B)
        text = HEAD + A.text + "\n\n" + B.text
        got = engine.generate(text, documents=[A, B], max_new_tokens=4, temperature=0)
        assert len(got.token_ids) > 0
        assert [s.outcome for s in got.report.of_kind("document")] == ["hit", "moved"]

    def test_the_same_document_twice(self) -> None:
        engine = make("always", recompute_share=1.0)
        learn_each_alone(engine, A, B)
        got = ask(engine, B, A, A)
        assert [s.outcome for s in got.report.of_kind("document")] == ["hit", "moved", "moved"]
        assert got.token_ids == ask(engine, B, A, A, reuse="off").token_ids

    def test_documents_behind_a_question_are_not_moved(self) -> None:
        engine = make("always")
        learn_each_alone(engine, A, B)
        text = f"Question: {Q1}\n\n{A.text}\n\n{B.text}\n\nAnswer:"
        report = engine.generate(text, documents=[A, B], question=Q1, max_new_tokens=2).report
        assert report.exact


class TestModes:
    def test_exact_requests_on_a_gated_engine_are_exact(self) -> None:
        engine = make()
        learn_each_alone(engine, A, B)
        assert ask(engine, B, A, reuse="exact").report.exact

    def test_gated_without_a_gate_is_a_wrong_request(self) -> None:
        engine = make("exact")
        with pytest.raises(RequestError, match="gate"):
            ask(engine, A, reuse="gated")

    def test_always_on_request(self) -> None:
        engine = make("exact")
        learn_each_alone(engine, A, B)
        assert not ask(engine, B, A, reuse="always").report.exact

    def test_a_gate_that_always_passes_lets_the_question_look_for_itself(self) -> None:
        engine = Engine(tiny_model("llama"), tiny_tokenizer(), gate=AlwaysGate(), reuse="gated")
        learn_each_alone(engine, A, B)
        report = ask(engine, B, A).report
        assert (report.gate, report.repair) == ("always", "two_pass")

    @pytest.mark.parametrize("family", ["gpt2", "bloom"])
    def test_a_model_that_cannot_be_moved(self, family: str) -> None:
        with pytest.raises(ConfigurationError, match="reuse='exact'"):
            make("always", family)
        engine = make("gated", family)
        learn_each_alone(engine, A, B)
        got = ask(engine, A, B)
        assert [s.reason for s in got.report.of_kind("document")] == ["exact_prefix", "not_movable"]
        assert got.token_ids == ask(engine, A, B, reuse="off").token_ids

    def test_invalidating_a_document_forgets_its_questions(self) -> None:
        engine = make()
        learn_each_alone(engine, A, B)
        engine.invalidate(B)
        learn_each_alone(engine, B, question=Q2)
        assert ask(engine, A, B).report.gate == "different"
        engine.invalidate("b")
        ask(engine, B, reuse="exact")
        assert ask(engine, A, B).report.gate == "unknown"

    def test_a_fault_while_moving_costs_nothing_but_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make("always")
        learn_each_alone(engine, A, B)
        expected = ask(engine, B, A, reuse="off")

        def broken(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr("rag_kvcache.model.arena.Arena.place_moved", broken)
        got = ask(engine, B, A)
        assert got.token_ids == expected.token_ids
        assert got.report.reason == "store_fault"
        assert engine.stats().faults["place"] == 1

    def test_tenants_share_nothing(self) -> None:
        engine = make()
        learn_each_alone(engine, A, B)
        report = ask(engine, A, B, tenant="other").report
        assert report.reused_tokens == 0
        assert report.gate is None


def test_overlap_is_the_longest_run_of_equal_tokens() -> None:
    a = np.arange(10, 40)
    assert overlap(a, a) == (0, 0, 30)
    assert overlap(a, a[3:]) == (3, 0, 27)
    assert overlap(a[2:], np.r_[7, 8, a[2:20], 9]) == (0, 2, 18)
    assert overlap(a, a + 100) == (0, 0, 0)
    assert overlap(a, a[9:]) == (0, 0, 0)  # beginnings further apart than a document's edges can be
    broken = a.copy()
    broken[10] = 0
    assert overlap(a, broken) == (11, 11, 19)
    assert overlap(a[:0], a) == (0, 0, 0)
