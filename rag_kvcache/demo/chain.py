"""The LangChain chain of the demo: what a user's own code looks like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import BaseMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from rag_kvcache.demo.corpus import Article
from rag_kvcache.errors import MissingExtraError

PROMPT = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "You are the support assistant of the shop Brindle & Bay. Answer the question from the "
            "articles below.\n\n{context}",
        ),
        ("human", "{question}"),
    ]
)


class SentenceEmbeddings(Embeddings):
    """A sentence-transformers model as LangChain embeddings."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as e:
            raise MissingExtraError("sentence-transformers", "demo") from e
        self._model: Any = SentenceTransformer(str(folder), device="cpu")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Unit vectors of the texts."""
        vectors: list[list[float]] = self._model.encode(
            texts, normalize_embeddings=True, show_progress_bar=False
        ).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The unit vector of a question."""
        return self.embed_documents([text])[0]


def make_retriever(articles: Iterable[Article], embeddings: Embeddings, documents: int) -> BaseRetriever:
    """A vector retriever that returns the ``documents`` nearest articles, nearest first."""
    store = InMemoryVectorStore(embeddings)
    store.add_documents([Document(a.text, id=a.id, metadata={"title": a.title}) for a in articles])
    return store.as_retriever(search_kwargs={"k": documents})


def format_docs(documents: Sequence[Document]) -> str:
    """The retrieved documents as one text."""
    return "\n\n".join(d.page_content for d in documents)


def make_chain(retriever: BaseRetriever, llm: Runnable[Any, BaseMessage]) -> Runnable[str, BaseMessage]:
    """The usual RAG chain. It ends with the model, not with a StrOutputParser, to keep the report."""
    return {"context": retriever | format_docs, "question": RunnablePassthrough()} | PROMPT | llm
