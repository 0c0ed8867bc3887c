"""The prompt of ``engine.answer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rag_kvcache.segment import Document

SYSTEM = "Answer the question from the context only. If the context does not contain the answer, say so."
SLOT = "{context}"
QUESTION = "{question}"


def rag_messages(context: str, question: str, system: str | None) -> list[dict[str, Any]]:
    """Chat messages with the documents before the question, so that they can be reused exactly."""
    return [
        {"role": "system", "content": SYSTEM if system is None else system},
        {"role": "user", "content": f"Context:\n\n{context}\n\nQuestion: {question}"},
    ]


def rag_text(context: str, question: str, system: str | None) -> str:
    """The same for models without a chat template."""
    return f"{SYSTEM if system is None else system}\n\nContext:\n\n{context}\n\nQuestion: {question}\nAnswer:"


def joined(documents: Sequence[Document]) -> str:
    """The documents' texts as they stand in the default prompt."""
    return "\n\n".join(d.text for d in documents)
