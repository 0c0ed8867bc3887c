"""LlamaIndex LLM that never prefills the same retrieved node twice.

    from llama_index.core import Settings
    from llama_index.llms.rag_kvcache import RAGKVCacheLLM

    Settings.llm = RAGKVCacheLLM(model_name="HuggingFaceTB/SmolLM2-135M-Instruct")

Importing this package loads no torch and registers nothing; both happen with the first LLM.
"""

from __future__ import annotations

from rag_kvcache.errors import MissingExtraError

try:
    import llama_index.core as _core  # noqa: F401
except ModuleNotFoundError as e:
    if not (e.name or "").startswith("llama_index"):
        raise
    raise MissingExtraError("llama-index-core", "llama-index") from e

from llama_index.llms.rag_kvcache.base import RAGKVCacheLLM

__all__ = ["RAGKVCacheLLM"]
