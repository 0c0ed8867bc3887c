"""A tiny engine, and a record of what the adapters ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from langchain_rag_kvcache import ChatRAGKVCache, RAGKVCacheLLM
from rag_kvcache.engine import Engine
from tests.tiny import tiny_model, tiny_tokenizer


class RecordingEngine:
    """A real engine; ``calls`` holds the arguments of every generation it was asked for, in order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _note(self, prompt: Any, request: dict[str, Any]) -> None:
        self.calls.append({"prompt": prompt, **request})

    def generate(self, prompt: Any, **request: Any) -> Any:
        self._note(prompt, request)
        return self._engine.generate(prompt, **request)

    def agenerate(self, prompt: Any, **request: Any) -> Any:
        self._note(prompt, request)
        return self._engine.agenerate(prompt, **request)

    def stream(self, prompt: Any, **request: Any) -> Any:
        self._note(prompt, request)
        return self._engine.stream(prompt, **request)

    def astream(self, prompt: Any, **request: Any) -> Any:
        self._note(prompt, request)
        return self._engine.astream(prompt, **request)


@pytest.fixture
def engine() -> Iterator[Any]:
    """A real engine around a tiny random model, with nothing cached."""
    with Engine(tiny_model(), tiny_tokenizer(), max_new_tokens=8) as engine:
        yield RecordingEngine(engine)


@pytest.fixture
def calls(engine: Any) -> list[dict[str, Any]]:
    """What the engine was asked for."""
    calls: list[dict[str, Any]] = engine.calls
    return calls


@pytest.fixture
def chat(engine: Any) -> ChatRAGKVCache:
    return ChatRAGKVCache(engine=engine, temperature=0)


@pytest.fixture
def llm(engine: Any) -> RAGKVCacheLLM:
    return RAGKVCacheLLM(engine=engine, temperature=0)
