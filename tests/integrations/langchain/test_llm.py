"""RAGKVCacheLLM by itself."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from langchain_rag_kvcache import RAGKVCacheLLM
from rag_kvcache.engine import Engine
from rag_kvcache.errors import InvalidTypeError

PROMPT = "Question: how long is the warranty? Answer:"


class Heard(BaseCallbackHandler):
    """Collects tokens and the result."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.result: LLMResult | None = None

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.result = response


def test_answer_is_the_engines(llm: RAGKVCacheLLM, engine: Engine) -> None:
    expected = engine.generate(PROMPT, temperature=0, reuse="off").text
    assert llm.invoke(PROMPT) == expected
    assert PROMPT not in expected


def test_metadata(llm: RAGKVCacheLLM) -> None:
    llm.invoke(PROMPT)
    result = llm.generate([PROMPT, PROMPT + " Again:"])
    for (generation,) in result.generations:
        info = generation.generation_info
        assert info is not None
        assert info["finish_reason"] == "length"
        assert info["model_name"] == llm.model_name
        assert (
            info["usage_metadata"]["input_token_details"]["cache_read"]
            == info["rag_kvcache"]["reused_tokens"]
        )
        assert info["rag_kvcache"]["link"]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("how", ["stream", "astream"])
async def test_streams_join_to_the_answer(how: str, llm: RAGKVCacheLLM) -> None:
    heard = Heard()
    if how == "stream":
        chunks = list(llm.stream(PROMPT, {"callbacks": [heard]}))
    else:
        chunks = [chunk async for chunk in llm.astream(PROMPT, {"callbacks": [heard]})]
    assert len(chunks) > 2
    assert "".join(chunks) == llm.invoke(PROMPT)
    assert heard.tokens == chunks
    assert heard.result is not None
    info = heard.result.generations[0][0].generation_info
    assert info is not None
    assert info["rag_kvcache"]["prompt_tokens"] == info["usage_metadata"]["input_tokens"]


def test_bound_arguments(llm: RAGKVCacheLLM, calls: list[dict[str, Any]]) -> None:
    full = llm.invoke(PROMPT)
    short = llm.bind(max_new_tokens=3, tenant="ann", reuse="off", documents=["two"], question="why?").invoke(
        PROMPT
    )
    assert full.startswith(short)
    assert len(short) < len(full)
    assert calls[-1]["max_new_tokens"] == 3
    assert calls[-1]["tenant"] == "ann"
    assert calls[-1]["reuse"] == "off"
    assert [d.text for d in calls[-1]["documents"]] == ["two"]
    assert calls[-1]["question"] == "why?"
    llm.bind(pipeline_kwargs={"max_new_tokens": 2}, skip_prompt=True).invoke(PROMPT)
    assert calls[-1]["max_new_tokens"] == 2
    with pytest.raises(InvalidTypeError):
        llm.bind(max_length=4).invoke(PROMPT)


def test_stop(llm: RAGKVCacheLLM, engine: Engine) -> None:
    full = llm.invoke(PROMPT)
    stop = full[len(full) // 2 :][:2]
    cut = full[: full.index(stop)]
    assert llm.invoke(PROMPT, stop=[stop]) == cut
    assert "".join(llm.stream(PROMPT, stop=[stop])) == cut
    assert RAGKVCacheLLM(engine=engine, temperature=0, stop=[stop]).invoke(PROMPT) == cut


async def test_batches_are_in_order(llm: RAGKVCacheLLM) -> None:
    prompts = [f"{'word ' * (i * 7)}Question {i}?" for i in range(8)]
    expected = [llm.bind(reuse="off").invoke(p) for p in prompts]
    assert llm.batch(prompts) == expected
    assert await llm.abatch(prompts) == expected
    assert llm.batch(prompts, {"max_concurrency": 3}) == expected
    assert llm.batch([]) == []


async def test_async_does_not_block_the_loop(llm: RAGKVCacheLLM) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticker = asyncio.create_task(tick())
    await llm.bind(max_new_tokens=100).ainvoke(PROMPT)
    ticker.cancel()
    assert ticks >= 2


def test_copies_share_the_engine(llm: RAGKVCacheLLM, engine: Engine) -> None:
    assert copy.deepcopy(llm).engine is engine
    assert "engine" not in llm.model_dump()
    assert llm._llm_type == "rag-kvcache"
    assert llm._get_ls_params()["ls_model_type"] == "llm"
    assert str(llm)
