"""The chain that people write: documents are linked to the prompt with nothing else changed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_rag_kvcache import ChatRAGKVCache, RAGKVCacheLLM
from langchain_rag_kvcache.retrieved import retrieved_documents
from tests.integrations.langchain.shop import (
    DOCUMENTS,
    KETTLE,
    LAMP,
    SHIPPING,
    TEXT_PROMPT,
    ShopRetriever,
    make_chain,
    make_text_chain,
)

WARRANTY = "How long is the warranty of the kettle?"
LITRES = "How many litres does the kettle hold?"
BULBS = "What bulbs does the lamp take, how many watts?"


def _texts(call: dict[str, Any]) -> list[str]:
    return [document.text for document in call["documents"]]


def _document_share(report: dict[str, Any]) -> float:
    documents = [s for s in report["segments"] if s["kind"] == "document"]
    assert documents
    return sum(s["reused"] for s in documents) / sum(s["tokens"] for s in documents)


def _last(pieces: list[Any]) -> Any:
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    return whole


async def _ask(chain: Any, how: str, question: str) -> AIMessage:
    if how == "invoke":
        return chain.invoke(question)
    if how == "ainvoke":
        return await chain.ainvoke(question)
    if how == "stream":
        return _last(list(chain.stream(question)))
    if how == "astream":
        return _last([piece async for piece in chain.astream(question)])
    if how == "batch":
        return chain.batch([question])[0]
    return (await chain.abatch([question]))[0]


WAYS = ["invoke", "ainvoke", "stream", "astream", "batch", "abatch"]


@pytest.mark.parametrize("how", WAYS)
async def test_second_question_on_the_same_document(
    how: str, chat: ChatRAGKVCache, calls: list[dict[str, Any]]
) -> None:
    chain = make_chain(chat)
    first, second = [await _ask(chain, how, question) for question in (WARRANTY, LITRES)]
    assert [_texts(call) for call in calls] == [[KETTLE.page_content]] * 2
    assert first.response_metadata["rag_kvcache"]["link"] == "run"
    report = second.response_metadata["rag_kvcache"]
    assert report["link"] == "run"
    assert _document_share(report) >= 0.9
    assert [s["label"] for s in report["segments"] if s["kind"] == "document"] == ["kettle"]
    assert second.content == (await _ask(make_chain(chat.bind(reuse="off")), how, LITRES)).content


@pytest.mark.parametrize("how", WAYS)
async def test_second_question_with_the_text_model(
    how: str, llm: RAGKVCacheLLM, calls: list[dict[str, Any]]
) -> None:
    chain = make_text_chain(llm, prompt=TEXT_PROMPT)
    texts = [await _ask(chain, how, question) for question in (WARRANTY, LITRES)]
    assert [_texts(call) for call in calls] == [[KETTLE.page_content]] * 2
    off = make_text_chain(llm.bind(reuse="off"), prompt=TEXT_PROMPT)
    assert texts == [await _ask(off, "invoke", question) for question in (WARRANTY, LITRES)]
    stats = llm.engine.stats()
    assert stats.reused_tokens > 0


def test_the_chain_of_the_readme_over_a_vector_store(chat: ChatRAGKVCache) -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
    store.add_documents(list(DOCUMENTS))
    retriever = store.as_retriever(search_kwargs={"k": 3})
    answer = make_text_chain(chat, retriever=retriever).invoke(WARRANTY)
    assert isinstance(answer, str)
    assert answer


def test_retrieved_documents_are_remembered(chat: ChatRAGKVCache) -> None:
    make_chain(chat).invoke(WARRANTY)
    outside = chat.invoke(f"Tell me more.\n\n{KETTLE.page_content}\n\nThanks!")
    assert outside.response_metadata["rag_kvcache"]["link"] == "registry"


def test_remembered_for_the_tenant_only(chat: ChatRAGKVCache) -> None:
    make_chain(chat.bind(tenant="ann")).invoke(WARRANTY)
    outside = chat.invoke(f"Tell me more.\n\n{KETTLE.page_content}\n\nThanks!")
    assert outside.response_metadata["rag_kvcache"]["link"] != "registry"


def test_metadata_may_hold_anything(chat: ChatRAGKVCache) -> None:
    for i in range(2):  # a store that hands out vectors: arrays do not compare
        document = Document(KETTLE.page_content, metadata={"vector": np.arange(3) + i})
        answer = make_chain(chat, ShopRetriever(documents=(document,))).invoke(WARRANTY)
        assert answer.response_metadata["rag_kvcache"]["link"] == "run"


def test_two_chains_at_once_in_threads(chat: ChatRAGKVCache, calls: list[dict[str, Any]]) -> None:
    chain = make_chain(chat, ShopRetriever(meet=threading.Barrier(2)))
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(chain.invoke, (WARRANTY, BULBS)))
    assert sorted(map(_texts, calls)) == sorted([[KETTLE.page_content], [LAMP.page_content]])
    assert all(answer.response_metadata["rag_kvcache"]["link"] == "run" for answer in answers)


@pytest.mark.parametrize("how", ["ainvoke", "astream"])
async def test_two_chains_at_once_in_tasks(
    how: str, chat: ChatRAGKVCache, calls: list[dict[str, Any]]
) -> None:
    chain = make_chain(chat, ShopRetriever(meet=threading.Barrier(2)))
    answers = await asyncio.gather(_ask(chain, how, WARRANTY), _ask(chain, how, BULBS))
    assert sorted(map(_texts, calls)) == sorted([[KETTLE.page_content], [LAMP.page_content]])
    assert all(answer.response_metadata["rag_kvcache"]["link"] == "run" for answer in answers)


@pytest.mark.parametrize("model", ["chat", "llm"])
def test_a_batch_keeps_its_runs_apart(
    model: str, request: pytest.FixtureRequest, calls: list[dict[str, Any]]
) -> None:
    prompt = {"prompt": TEXT_PROMPT} if model == "llm" else {}
    chain = make_chain(request.getfixturevalue(model), **prompt)
    questions = [WARRANTY, BULBS, "Is shipping free above 50 euros?"] * 2
    answers = chain.batch(questions)
    asked = {str(call["prompt"]): _texts(call) for call in calls}
    assert len(calls) == len(answers) == 6
    for text, documents in asked.items():
        assert len(documents) == 1
        assert documents[0].split(".")[0] in text


@pytest.mark.parametrize("model", ["chat", "llm"])
async def test_a_batch_inside_a_run_uses_the_nearest(
    model: str, request: pytest.FixtureRequest, calls: list[dict[str, Any]]
) -> None:
    prompt = {"prompt": TEXT_PROMPT} if model == "llm" else {}
    chain = make_chain(request.getfixturevalue(model), **prompt)
    questions = RunnableLambda(lambda _: [WARRANTY, BULBS])
    await (questions | RunnableLambda(lambda qs: chain.batch(qs))).ainvoke("go")
    assert sorted(map(_texts, calls)) == sorted([[KETTLE.page_content], [LAMP.page_content]])


def test_a_fault_of_the_record_does_not_break_the_chain(
    chat: ChatRAGKVCache, monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")

    chain = make_chain(chat)
    expected = chain.invoke(WARRANTY).content
    monkeypatch.setattr("langchain_rag_kvcache.retrieved.RetrievedDocuments._add", broken)
    answer = chain.invoke(WARRANTY)
    assert answer.content == expected
    assert calls[-1]["documents"] == ()
    assert answer.response_metadata["rag_kvcache"]["link"] == "registry"


def test_nothing_is_kept_after_the_chain(chat: ChatRAGKVCache) -> None:
    before = retrieved_documents().live_runs
    chain = make_chain(chat)
    chain.invoke(WARRANTY)
    list(chain.stream(WARRANTY))
    with pytest.raises(ValueError, match="empty"):
        (chain | RunnableLambda(_fail)).invoke(WARRANTY)
    assert retrieved_documents().live_runs == before


def _fail(_: Any) -> None:
    raise ValueError("empty")


def test_several_documents(chat: ChatRAGKVCache, calls: list[dict[str, Any]]) -> None:
    chain = make_chain(chat, ShopRetriever(k=3, documents=(KETTLE, SHIPPING, LAMP)))
    chain.invoke("warranty kettle litres")
    again = chain.invoke("warranty kettle receipt").response_metadata["rag_kvcache"]
    assert _texts(calls[0]) == _texts(calls[1])
    assert len(calls[1]["documents"]) == 3
    assert _document_share(again) >= 0.9
