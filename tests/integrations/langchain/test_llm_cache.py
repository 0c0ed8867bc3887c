"""LangChain's own cache never gives one model's answer for another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache

from langchain_rag_kvcache import ChatRAGKVCache, RAGKVCacheLLM
from rag_kvcache.engine import Engine
from tests.tiny import tiny_model, tiny_tokenizer

PROMPT = "How long is the warranty?"
CHANGES: list[dict[str, Any]] = [
    {"max_new_tokens": 3},
    {"temperature": 0.7},
    {"top_p": 0.5},
    {"seed": 5},
    {"tenant": "ann"},
    {"reuse": "off"},
    {"stop": ["z"]},
    {"generate_kwargs": {"repetition_penalty": 1.5}},
]
MODELS = [ChatRAGKVCache, RAGKVCacheLLM]


@pytest.fixture
def cache() -> InMemoryCache:
    return InMemoryCache()


@pytest.mark.parametrize("model", MODELS)
def test_the_same_question_is_answered_from_the_cache(
    model: Callable[..., Any], engine: Engine, cache: InMemoryCache, calls: list[Any]
) -> None:
    first, second = (model(engine=engine, temperature=0, cache=cache) for _ in range(2))
    assert first.invoke(PROMPT) == second.invoke(PROMPT) or model is ChatRAGKVCache
    assert len(calls) == 1


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bound", [False, True], ids=["field", "bound"])
async def test_changed_arguments_are_another_question(
    model: Callable[..., Any],
    change: dict[str, Any],
    bound: bool,
    engine: Engine,
    cache: InMemoryCache,
    calls: list[Any],
) -> None:
    plain = model(engine=engine, cache=cache)
    changed = plain.bind(**change) if bound else model(engine=engine, cache=cache, **change)
    plain.invoke(PROMPT)
    changed.invoke(PROMPT)
    assert len(calls) == 2
    await changed.ainvoke(PROMPT)
    plain.invoke(PROMPT)
    assert len(calls) == 2


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("other", ["weights", "dtype", "budget"])
def test_other_engines_are_another_question(
    model: Callable[..., Any], other: str, engine: Engine, cache: InMemoryCache
) -> None:
    if other == "weights":
        second = Engine(tiny_model(seed=1), tiny_tokenizer(), max_new_tokens=8)
    elif other == "dtype":
        second = Engine(tiny_model().bfloat16(), tiny_tokenizer(), max_new_tokens=8)
    else:
        second = Engine(tiny_model(), tiny_tokenizer(), max_new_tokens=8, max_bytes="1MB")
    with second:
        model(engine=engine, cache=cache).invoke(PROMPT)
        model(engine=second, cache=cache).invoke(PROMPT)
        assert len(cache._cache) == 2
