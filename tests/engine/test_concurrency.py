"""Many threads, few bytes, event loops: right answers, one build per document, nothing held too long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rag_kvcache import Document, Engine
from rag_kvcache.errors import EngineClosedError
from tests.engine.helpers import KETTLE, entries, held_bytes
from tests.tiny import tiny_model, tiny_tokenizer

DOCUMENTS = [
    Document(" ".join(f"Article {d}, part {i}: price {d * 31 + i} euros." for i in range(12)), id=str(d))
    for d in range(8)
]


def make(**settings: Any) -> Engine:
    return Engine(tiny_model(), tiny_tokenizer(), **{"max_new_tokens": 6, **settings})


def test_sixteen_threads_eight_documents_and_a_budget_of_two() -> None:
    reference = make(reuse="off")
    expected = {d.id: reference.answer("what price?", [d]).token_ids for d in DOCUMENTS}
    probe = make()
    probe.answer("what price?", [DOCUMENTS[0]])
    budget = 2 * probe.stats().tiers["L2"].bytes
    engine = make(max_bytes=budget)
    over: list[int] = []

    def ask(i: int) -> None:
        document = DOCUMENTS[i % len(DOCUMENTS)]
        assert engine.answer("what price?", [document]).token_ids == expected[document.id]
        if (held := engine.stats().tiers["L2"].bytes) > budget:
            over.append(held)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(64)))
    assert not over
    assert held_bytes(engine) <= budget + engine.stats().tiers["L1"].bytes
    assert engine.stats().tiers["L2"].evicted > 0


def test_concurrent_first_requests_build_each_document_once() -> None:
    engine = make()
    engine.warm(["Any document at all, to have the static prompt."])
    built: Counter[str] = Counter()
    lock = threading.Lock()
    gate = threading.Barrier(16)

    def ask(i: int) -> None:
        gate.wait()
        document = DOCUMENTS[i % len(DOCUMENTS)]
        report = engine.answer(f"what price has number {i}?", [document]).report
        with lock:
            built.update(s.label for s in report.of_kind("document") if s.outcome == "built")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(16)))
    assert built == {d.id: 1 for d in DOCUMENTS}


def test_two_engines_around_one_model_take_turns() -> None:
    model = tiny_model()
    one, other = (Engine(model, tiny_tokenizer(), max_new_tokens=6) for _ in range(2))
    expected = one.answer("what price?", [KETTLE], reuse="off").token_ids
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda e: e.answer("what price?", [KETTLE]).token_ids, [one, other] * 8)
    assert set(answers) == {expected}


def test_a_generation_that_fails_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    generate = engine._language_model.generate

    def failing(*args: Any) -> None:
        generate(*args)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._language_model, "generate", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.answer("what price?", [KETTLE])
    with pytest.raises(RuntimeError, match="out of memory"):
        list(engine.stream("what price?"))
    assert entries(engine) == []
    monkeypatch.undo()
    assert engine.answer("what price?", [KETTLE]).report.reused_tokens == 0


def test_a_document_larger_than_the_budget_bypasses_the_cache() -> None:
    engine = make(max_bytes=20_000)
    for _ in range(3):
        generation = engine.answer("what price?", [DOCUMENTS[0]])
    (document,) = generation.report.of_kind("document")
    assert (document.outcome, document.reason) == ("prefilled", "too_large")
    assert generation.token_ids == engine.answer("what price?", [DOCUMENTS[0]], reuse="off").token_ids


def test_a_stream_comes_in_pieces_and_joins_to_the_answer() -> None:
    engine = make()
    whole = engine.answer("what price?", [KETTLE])
    chunks = list(engine.stream(engine._rag_prompt(KETTLE.text, "what price?", None), documents=[KETTLE]))
    assert len(chunks) > 2
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.generation is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].report is not None
    assert chunks[-1].report.reused_tokens > 0


def test_an_abandoned_stream_stops_and_frees_the_model() -> None:
    engine = make()
    stream = engine.stream("what price?", max_new_tokens=900)
    next(stream)
    started = time.perf_counter()
    stream.close()
    engine.generate("what price?", max_new_tokens=1)
    waited = time.perf_counter() - started
    full = engine.generate("what price?", max_new_tokens=900).report.total_s
    assert waited < full / 3


async def test_the_loop_keeps_ticking_and_answers_are_those_of_generate() -> None:
    engine = make()
    prompt = engine._rag_prompt(KETTLE.text, "what price?", None)
    expected = engine.generate(prompt, documents=[KETTLE], max_new_tokens=300).token_ids
    gaps, last = [], time.perf_counter()

    async def tick() -> None:
        nonlocal last
        while True:
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticker = asyncio.create_task(tick())
    answers = await asyncio.gather(
        *(engine.agenerate(prompt, documents=[KETTLE], max_new_tokens=300) for _ in range(4))
    )
    ticker.cancel()
    assert {a.token_ids for a in answers} == {expected}
    assert len(gaps) > 20
    assert sorted(gaps)[len(gaps) * 9 // 10] < 0.1


async def test_a_cancelled_request_stops_and_leaves_whole_entries_or_none() -> None:
    engine = make()
    prompt = engine._rag_prompt(KETTLE.text, "what price?", None)
    task = asyncio.create_task(engine.agenerate(prompt, documents=[KETTLE], max_new_tokens=700))
    await asyncio.sleep(0.03)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = await engine.agenerate(prompt, documents=[KETTLE], max_new_tokens=6)
    assert after.token_ids == engine.generate(prompt, documents=[KETTLE], reuse="off").token_ids
    assert after.report.total_s < 5


async def test_a_request_cancelled_while_it_waits_never_runs() -> None:
    engine = make()
    with engine._language_model.lock:
        task = asyncio.create_task(engine.agenerate("what price?", documents=[KETTLE]))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await engine.agenerate("x and y")
    assert engine.stats().requests == 1


def test_a_closed_engine_says_so_and_holds_nothing() -> None:
    with make() as engine:
        engine.answer("what price?", [KETTLE])
    assert entries(engine) == []
    for call in (
        lambda: engine.generate("x"),
        lambda: list(engine.stream("x")),
        lambda: engine.warm([KETTLE]),
        lambda: engine.answer("x", [KETTLE]),
    ):
        with pytest.raises(EngineClosedError):
            call()
