"""The gates: the contract, what SbertGate compares, keeps and drops, and how it fails."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rag_kvcache.errors import ConfigurationError, MissingExtraError, ModelNotFoundError
from rag_kvcache.gate import AlwaysGate, Decision, Gate, NeverGate, SbertGate, Scope, Vector, Verdict
from rag_kvcache.keys import text_digest
from tests.gate_contract import DOCS, QUESTION, SCOPE, GateContract

A, B = DOCS
WAIT_S = 10.0  # for what is sure to come; a test that waits so long has failed


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Embedder:
    """Vectors by question: those given, for all others a random one that stays the same."""

    def __init__(self, **vectors: list[float]) -> None:
        self.vectors = vectors
        self.calls: list[str] = []

    def __call__(self, text: str) -> Vector:
        self.calls.append(text)
        if text in self.vectors:
            return np.array(self.vectors[text], dtype=np.float32)
        seed = int.from_bytes(text_digest(text)[:8], "little")
        return np.random.default_rng(seed).standard_normal(4).astype(np.float32)


class Blocking(Embedder):
    """An embedder that waits until it is let go."""

    def __init__(self, **vectors: list[float]) -> None:
        super().__init__(**vectors)
        self.go = threading.Event()

    def __call__(self, text: str) -> Vector:
        self.go.wait(WAIT_S)
        return super().__call__(text)


GateMaker = Callable[..., SbertGate]


@pytest.fixture
def make() -> Iterator[GateMaker]:
    """Makes gates that are closed after the test. A timeout no test reaches unless it means to."""
    made: list[SbertGate] = []

    def make(embed: Callable[[str], Any] | None = None, **kwargs: Any) -> SbertGate:
        made.append(SbertGate(embed=embed or Embedder(), **{"timeout_s": WAIT_S, **kwargs}))
        return made[-1]

    yield make
    for gate in made:
        gate.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class TestNeverGateKeepsTheContract(GateContract):
    learns = False
    stuck = False

    def make(self) -> Gate:
        return NeverGate()


class TestAlwaysGateKeepsTheContract(GateContract):
    learns = False
    stuck = True

    def make(self) -> Gate:
        return AlwaysGate()


class TestSbertGateKeepsTheContract(GateContract):
    def make(self) -> Gate:
        return SbertGate(embed=Embedder(), timeout_s=WAIT_S)


def test_the_null_gates_say_which_they_are() -> None:
    assert NeverGate().decide(QUESTION, DOCS, SCOPE) == Decision(allow=False, reason=Verdict.NEVER)
    assert AlwaysGate().decide(QUESTION, DOCS, SCOPE) == Decision(allow=True, reason=Verdict.ALWAYS)


class TestComparing:
    def test_a_paraphrase_passes(self, make: GateMaker) -> None:
        gate = make(Embedder(first=[1, 0], again=[2, 0.5]))
        gate.learn("first", DOCS, SCOPE)
        decision = gate.decide("again", DOCS, SCOPE)
        assert (decision.allow, decision.reason) == (True, Verdict.PASSED)
        assert decision.similarity == pytest.approx(2 / math.sqrt(4.25))
        assert decision.matched == (text_digest("first"),) * 2

    def test_another_question_does_not(self, make: GateMaker) -> None:
        gate = make(Embedder(first=[1, 0], other=[1, 1]))
        gate.learn("first", DOCS, SCOPE)
        decision = gate.decide("other", DOCS, SCOPE)
        assert (decision.allow, decision.reason, decision.matched) == (False, Verdict.DIFFERENT, ())
        assert decision.similarity == pytest.approx(math.sqrt(0.5))

    def test_the_opposite(self, make: GateMaker) -> None:
        gate = make(Embedder(first=[3, 1, 7], opposite=[-3, -1, -7]))
        gate.learn("first", DOCS, SCOPE)
        similarity = gate.decide("opposite", DOCS, SCOPE).similarity
        assert similarity is not None
        assert -1 <= similarity == pytest.approx(-1)

    def test_exactly_the_threshold_is_not_enough(self, make: GateMaker) -> None:
        embed = Embedder(first=[1, 0, 0, 0], half=[1, 1, 1, 1])  # exact in binary
        gate = make(embed, threshold=0.5)
        gate.learn("first", DOCS, SCOPE)
        assert gate.decide("half", DOCS, SCOPE) == Decision(False, Verdict.DIFFERENT, 0.5)
        gate = make(embed, threshold=math.nextafter(0.5, 0))
        gate.learn("first", DOCS, SCOPE)
        assert gate.decide("half", DOCS, SCOPE).allow

    def test_nothing_is_above_one(self, make: GateMaker) -> None:
        gate = make(threshold=1.0)
        for n in range(50):
            gate.learn(f"question {n}", DOCS, SCOPE)
            assert not gate.decide(f"question {n}", DOCS, SCOPE).allow

    def test_largest_over_questions_smallest_over_documents(self, make: GateMaker) -> None:
        gate = make(Embedder(east=[1, 0], north=[0, 1], q=[0.8, 0.6]), threshold=0.5)
        for question in ("north", "east"):
            gate.learn(question, [A], SCOPE)
        gate.learn("north", [B], SCOPE)
        decision = gate.decide("q", [A, B], SCOPE)
        assert decision.similarity == pytest.approx(0.6)
        assert decision.matched == (text_digest("east"), text_digest("north"))
        assert gate.decide("q", [B, A], SCOPE).matched == decision.matched[::-1]
        assert gate.decide("q", [A], SCOPE).similarity == pytest.approx(0.8)

    def test_every_document_must_pass(self, make: GateMaker) -> None:
        gate = make(Embedder(east=[1, 0], north=[0, 1]))
        gate.learn("east", [A], SCOPE)
        gate.learn("north", [B], SCOPE)
        assert gate.decide("east", [A], SCOPE).allow
        assert gate.decide("east", [A, B], SCOPE) == Decision(False, Verdict.DIFFERENT, 0.0)

    def test_a_document_without_questions_is_unknown(self, make: GateMaker) -> None:
        gate = make()
        gate.learn(QUESTION, [A], SCOPE)
        for documents in ([A, B], [B], []):
            assert gate.decide(QUESTION, documents, SCOPE) == Decision(False, Verdict.UNKNOWN)

    @pytest.mark.parametrize(
        "scope",
        [
            Scope("other", SCOPE.model, SCOPE.static),
            Scope(SCOPE.tenant, b"other", SCOPE.static),
            Scope(SCOPE.tenant, SCOPE.model, b"other"),
        ],
    )
    def test_another_scope_is_unknown(self, make: GateMaker, scope: Scope) -> None:
        gate = make()
        gate.learn(QUESTION, DOCS, SCOPE)
        assert gate.decide(QUESTION, DOCS, scope) == Decision(False, Verdict.UNKNOWN)

    @pytest.mark.parametrize("question", [None, "", " \n "], ids=repr)
    def test_a_blank_question(self, make: GateMaker, question: str | None) -> None:
        embed = Embedder()
        gate = make(embed)
        gate.learn(QUESTION, DOCS, SCOPE)
        gate.prepare(question)
        assert gate.decide(question, DOCS, SCOPE) == Decision(False, Verdict.NO_QUESTION)
        assert embed.calls == [QUESTION]

    def test_blanks_do_not_matter(self, make: GateMaker) -> None:
        embed = Embedder()
        gate = make(embed)
        digest = gate.learn("  How  tall\n is it? ", DOCS, SCOPE)
        assert digest == text_digest("How tall is it?")
        assert gate.decide("How tall is it?", DOCS, SCOPE).allow
        assert embed.calls == ["How tall is it?"]

    def test_decisions_are_counted(self, make: GateMaker) -> None:
        gate = make(Embedder(east=[1, 0], north=[0, 1]))
        gate.decide("east", DOCS, SCOPE)
        gate.learn("east", DOCS, SCOPE)
        for question in ("east", "east", "north", None):
            gate.decide(question, DOCS, SCOPE)
        assert gate.counts == {"unknown": 1, "passed": 2, "different": 1, "no_question": 1}


class TestKeeping:
    def test_a_record_lives_its_time(self, make: GateMaker) -> None:
        clock = Clock()
        gate = make(ttl_s=10.0, timer=clock)
        gate.learn(QUESTION, DOCS, SCOPE)
        clock.now = 9.9
        assert gate.decide(QUESTION, DOCS, SCOPE).allow
        clock.now = 10.0  # being matched gave it no more time
        assert gate.decide(QUESTION, DOCS, SCOPE).reason == Verdict.UNKNOWN
        assert gate.forget(SCOPE.tenant) == 0

    def test_each_record_has_its_own_time(self, make: GateMaker) -> None:
        clock = Clock()
        gate = make(Embedder(east=[1, 0], north=[0, 1]), ttl_s=10.0, timer=clock)
        gate.learn("east", [A], SCOPE)
        clock.now = 5.0
        gate.learn("north", [A], SCOPE)
        clock.now = 12.0
        assert gate.decide("east", [A], SCOPE).reason == Verdict.DIFFERENT
        assert gate.decide("north", [A], SCOPE).allow
        assert gate.forget(SCOPE.tenant, A) == 1

    def test_learning_again_gives_new_time_and_no_duplicate(self, make: GateMaker) -> None:
        clock = Clock()
        gate = make(ttl_s=10.0, timer=clock)
        gate.learn(QUESTION, [A], SCOPE)
        clock.now = 8.0
        gate.learn(QUESTION, [A], SCOPE)
        clock.now = 17.0
        assert gate.decide(QUESTION, [A], SCOPE).allow
        assert gate.forget(SCOPE.tenant) == 1

    def test_a_ticking_clock(self, make: GateMaker) -> None:
        """Records that expire between two looks at the clock are no fault."""
        clock = Clock()

        def tick() -> float:
            clock.now += 0.3
            return clock.now

        gate = make(ttl_s=2.0, timer=tick)
        for n in range(300):
            gate.learn(f"question {n % 3}", [A], SCOPE)
            for _ in range(n % 7):
                reason = gate.decide(f"question {n % 3}", [A], SCOPE).reason
                assert reason in (Verdict.PASSED, Verdict.DIFFERENT, Verdict.UNKNOWN)

    def test_records_of_a_document_are_bounded(self, make: GateMaker) -> None:
        gate = make(Embedder(q1=[1, 0, 0], q2=[0, 1, 0], q3=[0, 0, 1]), per_document=2)
        gate.learn("q1", [A], SCOPE)
        gate.learn("q2", [A], SCOPE)
        assert gate.decide("q1", [A], SCOPE).allow  # now the most recently used one
        gate.learn("q3", [A], SCOPE)
        assert [gate.decide(q, [A], SCOPE).allow for q in ("q1", "q2", "q3")] == [True, False, True]
        assert gate.forget(SCOPE.tenant, A) == 2

    def test_learning_again_drops_no_other(self, make: GateMaker) -> None:
        gate = make(Embedder(q1=[1, 0], q2=[0, 1]), per_document=2)
        for question in ("q1", "q2", "q1", "q2"):
            gate.learn(question, [A], SCOPE)
        assert gate.forget(SCOPE.tenant, A) == 2

    def test_documents_are_bounded(self, make: GateMaker) -> None:
        gate = make(max_documents=2)
        docs = [text_digest(f"doc {n}") for n in range(3)]
        gate.learn(QUESTION, docs[:2], SCOPE)
        gate.decide(QUESTION, docs[:1], SCOPE)  # now the most recently used one
        gate.learn(QUESTION, docs[2:], SCOPE)
        assert [gate.decide(QUESTION, [d], SCOPE).allow for d in docs] == [True, False, True]

    def test_a_question_is_embedded_once(self, make: GateMaker) -> None:
        embed = Embedder()
        gate = make(embed)
        gate.prepare(QUESTION)
        gate.decide(QUESTION, DOCS, SCOPE)
        gate.learn(QUESTION, DOCS, SCOPE)
        gate.decide(QUESTION, DOCS, SCOPE)
        assert embed.calls == [QUESTION]

    def test_embeddings_are_bounded(self, make: GateMaker) -> None:
        embed = Embedder()
        gate = make(embed)
        for n in range(257):
            gate.learn(f"question {n}", [A], SCOPE)
        gate.learn("question 256", [A], SCOPE)
        assert len(embed.calls) == 257
        gate.learn("question 0", [A], SCOPE)
        assert len(embed.calls) == 258

    def test_no_text_is_kept(self, make: GateMaker) -> None:
        secret = "a question that nobody else asks"
        gate = make(lambda text: np.ones(3, dtype=np.float32))
        gate.prepare(secret)
        gate.learn(secret, DOCS, SCOPE)
        gate.decide(secret, DOCS, SCOPE)
        until(lambda: not _texts_reachable_from(gate, secret))
        assert _texts_reachable_from({"k": [secret]}, secret)  # the search does find texts


def _texts_reachable_from(root: object, text: str) -> list[str]:
    found: list[str] = []
    seen: set[int] = set()
    todo: list[Any] = [root]
    while todo:
        obj = todo.pop()
        # Not into modules and classes: those lead to everything, this test included.
        if id(obj) in seen or isinstance(obj, type) or type(obj).__name__ == "module":
            continue
        seen.add(id(obj))
        if isinstance(obj, str) and text in obj:
            found.append(obj)
        if not (isinstance(obj, dict) and "__builtins__" in obj):
            todo.extend(gc.get_referents(obj))
    return found


class TestFailing:
    @pytest.mark.parametrize(
        "vector",
        [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, math.inf], [], [1.0, 0.0, 0.0]],
        ids=repr,
    )
    def test_a_vector_of_no_use(self, make: GateMaker, vector: list[float]) -> None:
        gate = make(Embedder(good=[1, 0], bad=vector))
        gate.learn("good", DOCS, SCOPE)
        assert gate.decide("bad", DOCS, SCOPE) == Decision(False, Verdict.FAILED)
        assert gate.learn("bad", DOCS, SCOPE) is None
        assert gate.decide("good", DOCS, SCOPE).allow
        assert gate.forget(SCOPE.tenant) == 2

    @pytest.mark.parametrize("error", [RuntimeError, MemoryError, TimeoutError, SystemExit])
    def test_an_embedder_that_raises(
        self, make: GateMaker, error: type[BaseException], caplog: pytest.LogCaptureFixture
    ) -> None:
        broken = False

        def embed(text: str) -> Vector:
            if broken:
                raise error(f"cannot embed {text!r}")
            return np.ones(3, dtype=np.float32)

        gate = make(embed)
        gate.learn("first", DOCS, SCOPE)
        broken = True
        assert gate.decide(QUESTION, DOCS, SCOPE) == Decision(False, Verdict.FAILED)
        assert gate.learn(QUESTION, DOCS, SCOPE) is None
        assert error.__name__ in caplog.text
        assert QUESTION not in caplog.text
        broken = False
        assert gate.decide(QUESTION, DOCS, SCOPE).allow  # a failure is not remembered

    def test_an_embedder_that_returns_nonsense(self, make: GateMaker) -> None:
        gate = make(lambda text: None if text == "q" else np.ones(3, dtype=np.float32))
        gate.learn("first", DOCS, SCOPE)
        assert gate.decide("q", DOCS, SCOPE) == Decision(False, Verdict.FAILED)

    def test_a_slow_embedder(self, make: GateMaker) -> None:
        embed = Blocking(first=[1, 0], slow=[1, 0])
        embed.go.set()
        gate = make(embed, timeout_s=0.1)
        until(lambda: gate.learn("first", DOCS, SCOPE) is not None)
        embed.go.clear()
        assert gate.decide("slow", DOCS, SCOPE) == Decision(False, Verdict.SLOW)
        assert gate.learn("slow", DOCS, SCOPE) is None
        embed.go.set()
        until(lambda: gate.decide("slow", DOCS, SCOPE).allow)
        assert embed.calls == ["first", "slow"]  # the late embedding was used
        assert gate.counts["slow"] >= 1

    def test_unknown_documents_wait_for_no_embedding(self, make: GateMaker) -> None:
        embed = Blocking()
        gate = make(embed)
        before = time.monotonic()
        gate.prepare(QUESTION)
        assert gate.decide(QUESTION, DOCS, SCOPE).reason == Verdict.UNKNOWN
        assert time.monotonic() - before < WAIT_S / 2
        embed.go.set()
        assert gate.learn(QUESTION, DOCS, SCOPE) is not None
        assert embed.calls == [QUESTION]

    def test_a_stuck_embedder_piles_up_no_questions(self, make: GateMaker) -> None:
        embed = Blocking()
        gate = make(embed, timeout_s=0.01)
        for n in range(300):
            gate.prepare(f"question {n}")
        assert gate.learn("one more", DOCS, SCOPE) is None
        embed.go.set()
        until(lambda: gate.learn("one more", DOCS, SCOPE) is not None)
        assert len(embed.calls) == 257

    def test_forgotten_while_it_was_embedded(self, make: GateMaker) -> None:
        embed = Blocking()
        embed.go.set()
        gate = make(embed)
        gate.learn("first", DOCS, SCOPE)
        embed.go.clear()
        with ThreadPoolExecutor(1) as pool:
            decision = pool.submit(gate.decide, "second", DOCS, SCOPE)
            time.sleep(0.05)
            gate.forget(SCOPE.tenant, A)
            embed.go.set()
            assert decision.result(WAIT_S) == Decision(False, Verdict.UNKNOWN)

    def test_close_waits_for_nothing(self, make: GateMaker) -> None:
        embed = Blocking()
        gate = make(embed)
        with ThreadPoolExecutor(2) as pool:
            learning = [pool.submit(gate.learn, q, DOCS, SCOPE) for q in ("running", "queued")]
            until(lambda: len(gate._pending) == 2)
            time.sleep(0.05)
            before = time.monotonic()
            gate.close()
            assert time.monotonic() - before < WAIT_S / 2
            embed.go.set()
            assert [f.result(WAIT_S) for f in learning] == [None, None]
        assert len(embed.calls) == 1
        assert gate.decide("running", DOCS, SCOPE).reason == Verdict.UNKNOWN

    def test_the_worker_goes_with_its_gate(self) -> None:
        def workers() -> int:
            return sum(t.name == "rag-kvcache-gate" for t in threading.enumerate())

        until(lambda: gc.collect() >= 0 and workers() == 0)
        gate = SbertGate(embed=Embedder())
        gate.learn(QUESTION, DOCS, SCOPE)
        assert workers() == 1
        del gate
        until(lambda: gc.collect() >= 0 and workers() == 0)

    def test_a_hanging_embedder_does_not_hold_up_the_interpreter(self) -> None:
        script = (
            "import time\n"
            "from rag_kvcache.gate import SbertGate\n"
            "SbertGate(embed=lambda text: time.sleep(600)).prepare('q')\n"
            "gate = SbertGate(embed=lambda text: time.sleep(600))\n"
            "gate.prepare('q')\n"
            "time.sleep(0.1)\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


class TestConstruction:
    @pytest.mark.parametrize(
        "wrong",
        [
            *({"threshold": t} for t in (0, -0.1, 1.01, math.nan, math.inf)),
            *({"timeout_s": t} for t in (0, -1, math.nan, math.inf)),
            *({"ttl_s": t} for t in (0, -1, math.nan)),
            {"max_documents": 0},
            {"per_document": 0},
        ],
        ids=str,
    )
    def test_wrong_settings(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            SbertGate(embed=Embedder(), **wrong)

    def test_without_sentence_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sentence_transformers", None)
        with pytest.raises(MissingExtraError, match=r"rag-kvcache\[gate\]"):
            SbertGate()
        SbertGate(embed=Embedder()).close()  # not needed then

    def test_no_such_model(self, tmp_path: Any) -> None:
        pytest.importorskip("sentence_transformers")
        for folder in (tmp_path, tmp_path / "none"):
            with pytest.raises(ModelNotFoundError, match="hub id"):
                SbertGate(model=str(folder))

    def test_importing_it_imports_no_sentence_transformers(self) -> None:
        script = (
            "import sys, rag_kvcache.gate\n"
            "assert not {'sentence_transformers', 'torch', 'transformers'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.real_model
def test_real_questions() -> None:
    pytest.importorskip("sentence_transformers")
    from rag_kvcache.model.demo import demo_embedding_folder

    try:
        folder = demo_embedding_folder()
    except ConfigurationError as e:
        pytest.skip(str(e))
    gate = SbertGate(model=str(folder), timeout_s=60.0)
    try:
        first = gate.learn("How do I reset my password?", DOCS, SCOPE)
        decision = gate.decide("How can I reset my password?", DOCS, SCOPE)
        assert decision.allow
        assert decision.matched == (first, first)
        other = gate.decide("How much does the yearly plan cost?", DOCS, SCOPE)
        assert other.reason == Verdict.DIFFERENT
        assert other.similarity is not None
        assert decision.similarity is not None
        assert other.similarity < 0.5 < 0.85 < decision.similarity
    finally:
        gate.close()
