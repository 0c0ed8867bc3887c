"""What every gate must do. A gate's test class inherits ``GateContract`` and says how to make one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rag_kvcache.gate import Decision, Gate, Scope
from rag_kvcache.keys import text_digest

SCOPE = Scope(tenant="default", model=b"model", static=b"static")
OTHER = Scope(tenant="other", model=b"model", static=b"static")
DOCS = (text_digest("doc a"), text_digest("doc b"))
QUESTION = "How tall is the tower?"
ODD_QUESTIONS = [None, "", " \n\t", "?", "x" * 100_000, "\ud800", "\x00", "塔有多高？"]


class GateContract:
    """The contract. ``make`` gives a new gate that knows no question yet.

    learns: whether it remembers questions.
    stuck: what it says to everything, whatever it has learned; None when it depends.
    """

    learns = True
    stuck: bool | None = None

    def make(self) -> Gate:
        raise NotImplementedError

    @pytest.fixture
    def gate(self) -> Iterator[Gate]:
        gate = self.make()
        yield gate
        gate.close()

    def allows(self, otherwise: bool) -> bool:
        return otherwise if self.stuck is None else self.stuck

    def test_before_anything_was_learned(self, gate: Gate) -> None:
        decision = gate.decide(QUESTION, DOCS, SCOPE)
        assert decision.allow is self.allows(False)
        assert (decision.similarity, decision.matched) == (None, ())

    def test_the_same_question_about_the_same_documents(self, gate: Gate) -> None:
        learned = gate.learn(QUESTION, DOCS, SCOPE)
        assert learned == (text_digest(QUESTION) if self.learns else None)
        decision = gate.decide(QUESTION, DOCS, SCOPE)
        assert decision.allow is self.allows(True)
        assert decision.matched == ((learned, learned) if self.learns else ())
        assert (decision.similarity == pytest.approx(1.0)) is self.learns

    @pytest.mark.parametrize("question", ODD_QUESTIONS, ids=repr)
    def test_no_question_raises(self, gate: Gate, question: str | None) -> None:
        gate.prepare(question)
        assert isinstance(gate.decide(question, DOCS, SCOPE), Decision)
        digest = gate.learn(question, DOCS, SCOPE)
        assert digest is None or self.learns
        assert isinstance(gate.decide(question, DOCS, SCOPE), Decision)

    @pytest.mark.parametrize("question", [None, "", "  "], ids=repr)
    def test_a_blank_question_is_not_learned(self, gate: Gate, question: str | None) -> None:
        assert gate.learn(question, DOCS, SCOPE) is None
        assert gate.decide(question, DOCS, SCOPE).allow is self.allows(False)

    def test_no_documents(self, gate: Gate) -> None:
        assert gate.learn(QUESTION, (), SCOPE) is None
        assert gate.decide(QUESTION, (), SCOPE).allow is self.allows(False)

    def test_other_scopes_see_nothing(self, gate: Gate) -> None:
        gate.learn(QUESTION, DOCS, SCOPE)
        for scope in (
            OTHER,
            Scope(SCOPE.tenant, b"other model", SCOPE.static),
            Scope(SCOPE.tenant, SCOPE.model, b"other static"),
        ):
            assert gate.decide(QUESTION, DOCS, scope).allow is self.allows(False)

    def test_forget_one_document(self, gate: Gate) -> None:
        gate.learn(QUESTION, DOCS, SCOPE)
        gate.learn("Who built it?", DOCS[:1], SCOPE)
        gate.learn(QUESTION, DOCS, OTHER)
        assert gate.forget("default", DOCS[0]) == (2 if self.learns else 0)
        assert gate.forget("default", DOCS[0]) == 0
        assert gate.decide(QUESTION, DOCS, SCOPE).allow is self.allows(False)
        assert gate.decide(QUESTION, DOCS[1:], SCOPE).allow is self.allows(True)
        assert gate.decide(QUESTION, DOCS, OTHER).allow is self.allows(True)

    def test_forget_a_tenant(self, gate: Gate) -> None:
        gate.learn(QUESTION, DOCS, SCOPE)
        gate.learn(QUESTION, DOCS, Scope(SCOPE.tenant, b"other model", SCOPE.static))
        gate.learn(QUESTION, DOCS, OTHER)
        assert gate.forget("nobody") == 0
        assert gate.forget("default") == (4 if self.learns else 0)
        assert gate.forget("default") == 0
        assert gate.decide(QUESTION, DOCS, SCOPE).allow is self.allows(False)
        assert gate.decide(QUESTION, DOCS, OTHER).allow is self.allows(True)

    def test_close_forgets_and_may_come_twice(self) -> None:
        gate = self.make()
        gate.learn(QUESTION, DOCS, SCOPE)
        gate.close()
        gate.close()
        gate.prepare(QUESTION)
        assert gate.decide(QUESTION, DOCS, SCOPE).allow is self.allows(False)
        assert gate.learn(QUESTION, DOCS, SCOPE) is None
        assert gate.forget("default") == 0

    def test_many_threads_at_once(self, gate: Gate) -> None:
        def work(seed: int) -> int:
            done = 0
            for n in range(50):
                question = f"question {(seed * 7 + n * 3) % 12}"
                gate.prepare(question)
                if n % 10 == 9:
                    gate.forget("default", DOCS[n % 2])
                elif n % 3:
                    digest = gate.learn(question, DOCS, SCOPE)
                    assert digest == (text_digest(question) if self.learns else None)
                else:
                    decision = gate.decide(question, DOCS, SCOPE)
                    assert len(decision.matched) == (2 if decision.allow and self.learns else 0)
                done += 1
            return done

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(work, range(8))) == 400
