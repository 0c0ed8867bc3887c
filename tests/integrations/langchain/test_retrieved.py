"""The record of what each run has retrieved."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import UUID, uuid4

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers import context

from langchain_rag_kvcache import ChatRAGKVCache
from langchain_rag_kvcache.retrieved import RetrievedDocuments, retrieved_documents
from tests.integrations.langchain.shop import KETTLE, LAMP, SHIPPING, ShopRetriever


def _chain(record: RetrievedDocuments, parent: UUID | None = None) -> UUID:
    run = uuid4()
    record.on_chain_start({}, {}, run_id=run, parent_run_id=parent)
    return run


def _retrieve(record: RetrievedDocuments, parent: UUID | None, *documents: Document) -> None:
    run = uuid4()
    record.on_retriever_start({}, "?", run_id=run, parent_run_id=parent)
    record.on_retriever_end(documents, run_id=run, parent_run_id=parent)


def test_a_cousin_deep_in_the_same_run_is_found() -> None:
    record = RetrievedDocuments()
    root = _chain(record)
    inner = _chain(record, _chain(record, root))
    _retrieve(record, inner, KETTLE)
    record.on_chain_end({}, run_id=inner)
    assert record.near(root) == (KETTLE,)


def test_the_nearest_ancestor_wins() -> None:
    record = RetrievedDocuments()
    root = _chain(record)
    first, second, third = (_chain(record, root) for _ in range(3))
    _retrieve(record, first, KETTLE)
    _retrieve(record, second, LAMP)
    assert record.near(first) == (KETTLE,)
    assert record.near(_chain(record, second)) == (LAMP,)
    assert record.near(third) == (KETTLE, LAMP)


def test_roots_do_not_see_each_other() -> None:
    record = RetrievedDocuments()
    one, other = _chain(record), _chain(record)
    _retrieve(record, one, KETTLE)
    assert record.near(other) == ()
    assert record.near(uuid4()) == ()
    assert record.near(None) == ()


def test_a_document_reported_twice_is_one() -> None:
    record = RetrievedDocuments()
    root = _chain(record)
    _retrieve(record, root, KETTLE, SHIPPING)
    _retrieve(record, root, SHIPPING, KETTLE, LAMP)
    assert record.near(root) == (KETTLE, SHIPPING, LAMP)


def test_runs_are_forgotten_when_they_end() -> None:
    record = RetrievedDocuments()
    root = _chain(record)
    child = _chain(record, root)
    _chain(record, child)  # never ends
    _retrieve(record, child, KETTLE)
    record.on_chain_error(ValueError(), run_id=child)
    assert record.near(root) == (KETTLE,)
    record.on_chain_end({}, run_id=root)
    assert record.live_runs == 0


def test_a_retriever_at_the_root_leaves_nothing() -> None:
    record = RetrievedDocuments()
    _retrieve(record, None, KETTLE)
    assert record.live_runs == 0


def test_abandoned_runs_are_bounded() -> None:
    record = RetrievedDocuments(max_runs=10, max_documents=3)
    for _ in range(20):
        root = _chain(record)
        _retrieve(record, root, *(Document(str(i)) for i in range(5)))
    assert record.live_runs <= 10
    assert [d.page_content for d in record.near(root)] == ["2", "3", "4"]


def test_a_parent_outside_langchain_links_and_is_bounded() -> None:
    record = RetrievedDocuments(max_foreign=2)
    foreign = uuid4()
    _retrieve(record, foreign, KETTLE)
    assert record.near(foreign) == (KETTLE,)
    for _ in range(5):
        _retrieve(record, uuid4(), LAMP)
    assert record.near(foreign) == ()
    assert record.live_runs == 2


def test_a_fault_is_logged_once_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    record = RetrievedDocuments()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            record.on_retriever_end(None, run_id=uuid4())  # type: ignore[arg-type]
    assert len(caplog.records) == 1


def test_registered_once_for_all_models(engine: Any) -> None:
    ChatRAGKVCache(engine=engine)
    hooks = len(context._configure_hooks)
    ChatRAGKVCache(engine=engine)
    assert len(context._configure_hooks) == hooks
    assert retrieved_documents() is retrieved_documents()


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream"])
async def test_nothing_stays_after_a_chain(how: str, chat: ChatRAGKVCache) -> None:
    before = retrieved_documents().live_runs
    seen: list[int] = []
    chain = ShopRetriever() | RunnableLambda(lambda d: seen.append(retrieved_documents().live_runs) or d)
    if how == "invoke":
        await asyncio.to_thread(chain.invoke, "kettle")
    elif how == "ainvoke":
        await chain.ainvoke("kettle")
    else:
        list(chain.stream("kettle"))
    assert seen[0] > before
    assert retrieved_documents().live_runs == before
