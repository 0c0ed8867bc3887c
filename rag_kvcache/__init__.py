"""Never prefill the same retrieved document twice: KV-cache reuse for RAG with Hugging Face models.

Importing this package loads neither torch nor transformers; both come with the first engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_kvcache.engine import Engine as Engine
    from rag_kvcache.report import Chunk as Chunk
    from rag_kvcache.report import Generation as Generation
    from rag_kvcache.report import Report as Report
    from rag_kvcache.report import SegmentReport as SegmentReport
    from rag_kvcache.report import Stats as Stats
    from rag_kvcache.report import Usage as Usage
    from rag_kvcache.report import WarmReport as WarmReport
    from rag_kvcache.segment import Document as Document
    from rag_kvcache.segment import Level as Level
    from rag_kvcache.segment import Outcome as Outcome
    from rag_kvcache.segment import Reason as Reason
    from rag_kvcache.segment import SegmentKind as SegmentKind
    from rag_kvcache.settings import Settings as Settings

_HOME = {
    "Engine": "rag_kvcache.engine",
    "Chunk": "rag_kvcache.report",
    "Generation": "rag_kvcache.report",
    "Report": "rag_kvcache.report",
    "SegmentReport": "rag_kvcache.report",
    "Stats": "rag_kvcache.report",
    "Usage": "rag_kvcache.report",
    "WarmReport": "rag_kvcache.report",
    "Document": "rag_kvcache.segment",
    "Level": "rag_kvcache.segment",
    "Outcome": "rag_kvcache.segment",
    "Reason": "rag_kvcache.segment",
    "SegmentKind": "rag_kvcache.segment",
    "Settings": "rag_kvcache.settings",
}

__all__ = sorted([*_HOME, "errors"])
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("rag_kvcache.errors")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rag_kvcache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
