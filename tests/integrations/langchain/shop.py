"""A shop's documents, a retriever over them, and the chain that people write."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough

KETTLE = Document(
    "The warranty of the kettle lasts two years. Return it within 30 days, with the receipt. The kettle "
    "holds 1.7 litres and switches itself off. Repairs are free in the first year; bring the receipt.",
    id="kettle",
    metadata={"source": "kettle.md"},
)
SHIPPING = Document(
    "Shipping is free above 50 euros. Parcels arrive within three days. An order can be changed until it is "
    "packed. 退货需要在三十天内完成。 保修期为两年。",
    metadata={"source": "shipping.md"},
)
LAMP = Document(
    "The lamp takes bulbs of 40 watts at most. It has a switch in its cord. Do not cover the lamp. The shade "
    "can be washed by hand in lukewarm water; let it dry before use.",
)
DOCUMENTS = (KETTLE, SHIPPING, LAMP)

CHAT_PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "You are a helpful shop assistant."),
        ("human", "Context:\n\n{context}\n\nQuestion: {question}"),
    ]
)
TEXT_PROMPT = PromptTemplate.from_template(
    "You are a helpful shop assistant. Context:\n\n{context}\n\nQuestion: {question}\nAnswer:"
)


class ShopRetriever(BaseRetriever):
    """Returns the documents whose first line shares the most words with the query: deterministic."""

    k: int = 1
    documents: tuple[Document, ...] = DOCUMENTS
    meet: Any = None
    """A barrier where concurrent retrievals wait for each other, so that their runs overlap."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        words = set(re.findall(r"\w+", query.lower()))

        def shared(document: Document) -> int:
            return len(words & set(re.findall(r"\w+", document.page_content.lower())))

        found = sorted(self.documents, key=shared, reverse=True)[: self.k]
        if isinstance(self.meet, threading.Barrier):
            self.meet.wait(timeout=30)
        return found


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def make_chain(
    llm: Runnable[Any, Any],
    retriever: BaseRetriever | None = None,
    prompt: BasePromptTemplate[Any] = CHAT_PROMPT,
    formatter: Callable[[list[Document]], str] = format_docs,
) -> Runnable[str, Any]:
    """The chain of the README, without its output parser."""
    retriever = retriever or ShopRetriever()
    return {"context": retriever | formatter, "question": RunnablePassthrough()} | prompt | llm


def make_text_chain(llm: Runnable[Any, Any], **options: Any) -> Runnable[str, str]:
    """The chain of the README."""
    return make_chain(llm, **options) | StrOutputParser()
