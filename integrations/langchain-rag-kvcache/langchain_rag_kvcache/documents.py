"""LangChain Documents as the engine's Documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from langchain_core.documents import Document as LangChainDocument

from rag_kvcache.errors import InvalidTypeError
from rag_kvcache.segment import Document

_LABELS = ("id", "source")
_MAX_DEPTH = 6


def to_document(document: LangChainDocument | Document | str) -> Document:
    """The engine's view of a document. The text is taken as it is: a formatter may change it, the engine
    finds what stands in the prompt."""
    if isinstance(document, Document):
        return document
    if isinstance(document, str):
        return Document(document)
    if isinstance(document, LangChainDocument):
        return Document(document.page_content, id=_label(document), metadata=document.metadata)
    raise InvalidTypeError(
        "documents must be LangChain Documents, rag_kvcache Documents or strings, "
        f"not {type(document).__name__}"
    )


def to_documents(documents: Iterable[LangChainDocument | Document | str]) -> tuple[Document, ...]:
    """All documents, each text once, in the order given; empty ones left out."""
    if isinstance(documents, str | LangChainDocument | Document):
        documents = (documents,)
    if not isinstance(documents, Iterable):
        raise InvalidTypeError(f"documents must be a list of documents, not {type(documents).__name__}")
    by_text: dict[str, Document] = {}
    for document in map(to_document, documents):
        if document.text:
            by_text.setdefault(document.text, document)
    return tuple(by_text.values())


def documents_within(value: Any, depth: int = _MAX_DEPTH) -> Iterator[LangChainDocument]:
    """The Documents in a tool's artifact, which is whatever the tool's author made it."""
    if isinstance(value, LangChainDocument):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from documents_within(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from documents_within(item, depth - 1)


def _label(document: LangChainDocument) -> str | None:
    labels = (document.id, *(document.metadata.get(name) for name in _LABELS))
    return next((str(label) for label in labels if label), None)
