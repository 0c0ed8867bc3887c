"""LlamaIndex nodes as ``rag_kvcache.Document``: the text as the LLM gets to see it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from rag_kvcache.errors import InvalidTypeError
from rag_kvcache.segment import Document


def as_document(item: Any) -> Document:
    """One node (with or without score), LlamaIndex or rag_kvcache Document, or text.

    A node's text is what response synthesizers put into the prompt: its content with the metadata that
    its ``excluded_llm_metadata_keys`` and templates leave visible to the LLM. Its node id is a label.
    """
    if isinstance(item, Document):
        return item
    if isinstance(item, str):
        return Document(item)
    node = item.node if isinstance(item, NodeWithScore) else item
    if isinstance(node, BaseNode):
        return Document(node.get_content(metadata_mode=MetadataMode.LLM), id=node.node_id)
    raise InvalidTypeError(
        f"a document must be a node, a Document or a str, not {type(item).__name__}: "
        "pass what a retriever returns, or the text"
    )


def as_documents(items: Any) -> tuple[Document, ...]:
    """Many of them, or a single one."""
    if isinstance(items, (str, Document, NodeWithScore, BaseNode)):
        return (as_document(items),)
    if not isinstance(items, Iterable):
        raise InvalidTypeError(f"documents must be a list of nodes or texts, not {type(items).__name__}")
    return tuple(as_document(item) for item in items)
