"""The engine: one straight line from a prompt to an answer and its report."""

from rag_kvcache.engine.engine import Engine

__all__ = ["Engine"]
