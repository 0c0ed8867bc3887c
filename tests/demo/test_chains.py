"""SmolLM2-135M in the chains that the README shows, end to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnablePassthrough
from llama_index.core import Document as LlamaIndexDocument
from llama_index.core import Settings as LlamaIndexSettings
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.llms.rag_kvcache import RAGKVCacheLLM

from langchain_rag_kvcache import ChatRAGKVCache
from rag_kvcache import Engine
from rag_kvcache.demo.chain import PROMPT, SentenceEmbeddings, format_docs, make_chain, make_retriever
from rag_kvcache.demo.compare import compare
from rag_kvcache.demo.corpus import load_articles
from rag_kvcache.model.demo import demo_embedding_folder

pytestmark = pytest.mark.real_model

FIRST = "What does the Aurora K2 kettle cost and how much water does it hold?"
SECOND = "Which temperature button of the Aurora K2 kettle is for green tea?"
CHINESE = ("Aurora K2 电水壶的容量和售价是多少？", "Aurora K2 电水壶泡绿茶用哪个温度键？")


@pytest.fixture(scope="module")
def embeddings() -> Embeddings:
    return SentenceEmbeddings(demo_embedding_folder())


@pytest.fixture(scope="module")
def model() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", max_new_tokens=4) as engine:
        yield engine


@pytest.fixture
def engine(model: Engine) -> Iterator[Engine]:
    """An engine with an empty cache around the same weights."""
    with Engine(model.model, model.tokenizer, max_new_tokens=4) as engine:
        yield engine


def share_of_documents_reused(report: Mapping[str, Any]) -> float:
    documents = [s for s in report["segments"] if s["kind"] == "document"]
    assert documents, report
    return float(sum(s["reused"] for s in documents) / sum(s["tokens"] for s in documents))


class TestLangChain:
    @pytest.mark.parametrize("questions", [(FIRST, SECOND), CHINESE])
    def test_the_second_question_reuses_the_documents(
        self, engine: Engine, embeddings: Embeddings, questions: tuple[str, str]
    ) -> None:
        retriever = make_retriever(load_articles(), embeddings, 2)
        llm = ChatRAGKVCache(engine=engine, temperature=0)
        on, off = make_chain(retriever, llm), make_chain(retriever, llm.bind(reuse="off"))
        first, second = (on.invoke(question) for question in questions)
        assert share_of_documents_reused(first.response_metadata["rag_kvcache"]) == 0
        assert share_of_documents_reused(second.response_metadata["rag_kvcache"]) >= 0.9
        assert [first.text, second.text] == [off.invoke(question).text for question in questions]

    def test_the_chain_of_the_readme(self, engine: Engine, embeddings: Embeddings) -> None:
        retriever = make_retriever(load_articles(), embeddings, 2)
        llm = ChatRAGKVCache(engine=engine)
        chain: Runnable[str, str] = (
            {"context": retriever | format_docs, "question": RunnablePassthrough()}
            | PROMPT
            | llm
            | StrOutputParser()
        )
        assert isinstance(chain.invoke(FIRST), str)
        before = engine.stats().reused_tokens
        chain.invoke(SECOND)
        assert engine.stats().reused_tokens > before + 600

    def test_compare_puts_both_ways_side_by_side(self, engine: Engine, embeddings: Embeddings) -> None:
        retriever = make_retriever(load_articles(), embeddings, 2)
        llm = ChatRAGKVCache(engine=engine, temperature=0)
        rows = compare(
            [FIRST, SECOND],
            off=make_chain(retriever, llm.bind(reuse="off")),
            on=make_chain(retriever, llm),
            documents=lambda question: tuple(str(d.id) for d in retriever.invoke(question)),
        )
        assert [row.all_cached for row in rows] == [False, True]
        assert all(row.identical and row.off.cached == 0 for row in rows)
        assert rows[0].documents == rows[1].documents == ("kettle-aurora-k2", "kettle-care")


class LlamaIndexEmbeddings(BaseEmbedding):
    """The same embeddings for LlamaIndex."""

    inner: Any

    def _get_query_embedding(self, query: str) -> list[float]:
        return list(self.inner.embed_query(query))

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_query_embedding(text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


class TestLlamaIndex:
    def test_the_second_question_reuses_the_nodes(
        self, engine: Engine, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(LlamaIndexSettings, "_embed_model", LlamaIndexEmbeddings(inner=embeddings))
        monkeypatch.setattr(LlamaIndexSettings, "_llm", RAGKVCacheLLM(engine=engine, temperature=0))
        index = VectorStoreIndex.from_documents(
            [LlamaIndexDocument(text=a.text, id_=a.id) for a in load_articles() if a.language == "en"]
        )
        queries = index.as_query_engine(similarity_top_k=2)
        first = str(queries.query(FIRST))
        before = engine.stats().reused_tokens
        second = str(queries.query(SECOND))
        # Both articles have about 350 tokens, and the static prompt before them is reused too.
        assert engine.stats().reused_tokens - before >= 0.9 * 2 * 345
        llm = LlamaIndexSettings.llm
        monkeypatch.setattr(
            LlamaIndexSettings, "_llm", RAGKVCacheLLM(engine=engine, temperature=0, reuse="off")
        )
        assert llm is not LlamaIndexSettings.llm
        plain = index.as_query_engine(similarity_top_k=2)
        assert [first, second] == [str(plain.query(FIRST)), str(plain.query(SECOND))]
