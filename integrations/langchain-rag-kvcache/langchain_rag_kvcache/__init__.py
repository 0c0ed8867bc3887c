"""LangChain models that never prefill the same retrieved document twice.

``ChatRAGKVCache`` takes the place of ``ChatHuggingFace``, ``RAGKVCacheLLM`` that of
``HuggingFacePipeline``; nothing else in a chain changes. Importing this package loads neither torch nor
transformers and touches no other chain.
"""

from __future__ import annotations

from rag_kvcache.errors import MissingExtraError

try:
    import langchain_core  # noqa: F401
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "langchain_core":
        raise
    raise MissingExtraError("langchain-core", "langchain") from error

from langchain_rag_kvcache.chat import ChatRAGKVCache
from langchain_rag_kvcache.llm import RAGKVCacheLLM

__all__ = ["ChatRAGKVCache", "RAGKVCacheLLM"]
