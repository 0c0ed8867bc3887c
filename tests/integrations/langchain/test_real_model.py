"""The README's two chains on SmolLM2-135M-Instruct, with a real vector store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore, VectorStoreRetriever

from langchain_rag_kvcache import ChatRAGKVCache, RAGKVCacheLLM
from rag_kvcache.engine import Engine
from tests.integrations.langchain.shop import DOCUMENTS, TEXT_PROMPT, make_chain

pytestmark = pytest.mark.real_model

QUESTIONS = ("How long is the warranty of the kettle?", "Is shipping free above 50 euros?")


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", dtype="float32", device="cpu", max_new_tokens=12) as engine:
        yield engine


@pytest.fixture
def retriever() -> VectorStoreRetriever:
    # Both questions retrieve all documents, in an order that the embedding decides.
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=32))
    store.add_documents(list(DOCUMENTS))
    return store.as_retriever(search_kwargs={"k": len(DOCUMENTS)})


def _sorted(documents: list[Any]) -> str:
    return "\n\n".join(sorted(document.page_content for document in documents))


@pytest.mark.parametrize("model", [ChatRAGKVCache, RAGKVCacheLLM])
def test_second_question_reuses_the_documents(
    model: type[ChatRAGKVCache] | type[RAGKVCacheLLM], demo: Engine, retriever: VectorStoreRetriever
) -> None:
    llm = model.from_model_id(engine=demo, tenant=model.__name__, temperature=0)
    prompt = {"prompt": TEXT_PROMPT} if model is RAGKVCacheLLM else {}
    chain = make_chain(llm, retriever, formatter=_sorted, **prompt)
    off = make_chain(llm.bind(reuse="off"), retriever, formatter=_sorted, **prompt)
    before = demo.stats()
    answers = [chain.invoke(question) for question in QUESTIONS]
    after = demo.stats()
    assert _text(answers[-1]) == _text(off.invoke(QUESTIONS[-1]))
    reused = after.reused_tokens - before.reused_tokens
    documents = demo.count_tokens(_sorted(list(DOCUMENTS)))
    assert reused >= 0.9 * documents


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.text)
