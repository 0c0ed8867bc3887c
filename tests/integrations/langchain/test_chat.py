"""ChatRAGKVCache by itself: calls, streams, arguments, metadata."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import ValidationError

from langchain_rag_kvcache import ChatRAGKVCache, RAGKVCacheLLM
from langchain_rag_kvcache.link import Link
from rag_kvcache.engine import Engine
from rag_kvcache.errors import ChatTemplateError, EngineClosedError, InvalidTypeError
from rag_kvcache.report import Chunk
from rag_kvcache.segment import Document
from tests.integrations.langchain.shop import KETTLE, LAMP
from tests.tiny import tiny_model, tiny_tokenizer

QUESTION = "How long is the warranty?"


class Tokens(BaseCallbackHandler):
    """Collects what on_llm_new_token is told."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)


def test_answer_is_the_engines(chat: ChatRAGKVCache, engine: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = engine.generate(messages, temperature=0, reuse="off")
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert answer.content == expected.text
    assert QUESTION not in answer.text


def test_metadata(chat: ChatRAGKVCache) -> None:
    chat.invoke(QUESTION)
    answer = chat.invoke(QUESTION)
    usage, told = answer.usage_metadata, answer.response_metadata
    assert usage is not None
    assert usage["output_tokens"] == 8
    assert usage["input_token_details"]["cache_read"] == told["rag_kvcache"]["reused_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + 8
    assert told["finish_reason"] == "length"
    assert told["model_name"] == chat.model_name
    assert told["rag_kvcache"]["link"] in set(Link)
    json.dumps(told)


@pytest.mark.parametrize("how", ["stream", "astream"])
async def test_streams_join_to_the_answer(how: str, chat: ChatRAGKVCache) -> None:
    expected = await chat.ainvoke(QUESTION)
    if how == "stream":
        chunks = list(chat.stream(QUESTION))
    else:
        chunks = [chunk async for chunk in chat.astream(QUESTION)]
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == expected.content
    *first, last = chunks
    assert all(
        chunk.usage_metadata is None and "rag_kvcache" not in chunk.response_metadata for chunk in first
    )
    assert last.usage_metadata is not None
    assert last.response_metadata["rag_kvcache"]["prompt_tokens"] == last.usage_metadata["input_tokens"]
    assert last.response_metadata["finish_reason"] == "length"
    assert last.chunk_position == "last"


@pytest.mark.parametrize("how", ["stream", "astream", "invoke", "ainvoke"])
async def test_callbacks_are_told_of_tokens(how: str, engine: Engine) -> None:
    tokens = Tokens()
    chat = ChatRAGKVCache(engine=engine, temperature=0, streaming=True)
    if how == "stream":
        list(chat.stream(QUESTION, {"callbacks": [tokens]}))
    elif how == "astream":
        [_ async for _ in chat.astream(QUESTION, {"callbacks": [tokens]})]
    elif how == "invoke":
        await asyncio.to_thread(chat.invoke, QUESTION, {"callbacks": [tokens]})
    else:
        await chat.ainvoke(QUESTION, {"callbacks": [tokens]})
    assert "".join(tokens.tokens) == chat.invoke(QUESTION).content
    assert len(tokens.tokens) > 2


def test_bound_length(chat: ChatRAGKVCache) -> None:
    full = chat.invoke(QUESTION).text
    for name in ("max_new_tokens", "max_tokens"):
        answer = chat.bind(**{name: 3}).invoke(QUESTION)
        assert answer.usage_metadata["output_tokens"] == 3
        assert full.startswith(answer.text)


def test_stop(chat: ChatRAGKVCache, engine: Engine) -> None:
    full = chat.invoke(QUESTION).text
    stop = full[len(full) // 2 :][:2]
    cut = full[: full.index(stop)]
    for answer in (
        chat.invoke(QUESTION, stop=[stop]),
        chat.bind(stop=[stop]).invoke(QUESTION),
        ChatRAGKVCache(engine=engine, temperature=0, stop=[stop]).invoke(QUESTION),
        ChatRAGKVCache(engine=engine, temperature=0, stop_sequences=[stop]).invoke(QUESTION),
    ):
        assert answer.content == cut
        assert answer.response_metadata["finish_reason"] == "stop"
    assert "".join(chunk.text for chunk in chat.stream(QUESTION, stop=[stop])) == cut


def test_bound_arguments_reach_the_engine(chat: ChatRAGKVCache, calls: list[dict[str, Any]]) -> None:
    given = Document("The warranty lasts two years.")
    chat.bind(
        tenant="ann", reuse="off", documents=[KETTLE, given, "text"], question=QUESTION, seed=3, top_p=0.9
    ).invoke(QUESTION)
    (call,) = calls
    assert call["tenant"] == "ann"
    assert call["reuse"] == "off"
    assert call["question"] == QUESTION
    assert call["seed"] == 3
    assert call["top_p"] == 0.9
    assert [d.text for d in call["documents"]] == [KETTLE.page_content, given.text, "text"]
    assert call["documents"][0].id == "kettle"


def test_tenants_do_not_share(chat: ChatRAGKVCache) -> None:
    chat.invoke(QUESTION)
    assert chat.invoke(QUESTION).usage_metadata["input_token_details"]["cache_read"] > 0
    other = chat.bind(tenant="ann").invoke(QUESTION)
    assert other.usage_metadata["input_token_details"]["cache_read"] == 0


def test_reuse_off(chat: ChatRAGKVCache) -> None:
    warm = [chat.invoke(QUESTION) for _ in range(2)][1]
    off = chat.bind(reuse="off").invoke(QUESTION)
    assert off.content == warm.content
    assert off.usage_metadata["input_token_details"]["cache_read"] == 0
    assert off.response_metadata["rag_kvcache"]["mode"] == "off"


def test_seed_repeats_a_sample(engine: Engine) -> None:
    chat = ChatRAGKVCache(engine=engine, temperature=1.5, max_new_tokens=12)
    one, same, other = (chat.bind(seed=seed).invoke(QUESTION).text for seed in (1, 1, 2))
    assert one == same != other


def test_documents_in_a_tool_message(chat: ChatRAGKVCache, calls: list[dict[str, Any]]) -> None:
    def ask(question: str) -> AIMessage:
        artifact = ("found", {"hits": [KETTLE, [LAMP]]})
        return chat.invoke(
            [
                HumanMessage(question),
                AIMessage("", tool_calls=[{"name": "find", "args": {}, "id": "1"}]),
                ToolMessage(f"Found: {KETTLE.page_content}", tool_call_id="1", artifact=artifact),
            ]
        )

    answer = ask(QUESTION)
    assert [d.text for d in calls[0]["documents"]] == [KETTLE.page_content, LAMP.page_content]
    assert answer.response_metadata["rag_kvcache"]["link"] == "artifact"


def test_without_a_link_the_registry_knows_the_text(chat: ChatRAGKVCache) -> None:
    prompt = "Context: {}\n\nQuestion: {}".format
    chat.bind(documents=[KETTLE]).invoke(prompt(KETTLE.page_content, "How long?"))
    again = chat.invoke(prompt(KETTLE.page_content, "How much?")).response_metadata["rag_kvcache"]
    assert again["link"] == "registry"
    assert again["reused_tokens"] > 0


def test_a_fault_in_the_link_costs_the_link_only(
    chat: ChatRAGKVCache, monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no")

    expected = chat.invoke(QUESTION).content
    monkeypatch.setattr("langchain_rag_kvcache.retrieved.RetrievedDocuments.near", broken)
    assert chat.invoke(QUESTION).content == expected
    assert calls[-1]["documents"] == ()


async def test_the_loop_is_never_blocked(engine: Engine) -> None:
    chat = ChatRAGKVCache(engine=engine, temperature=0, max_new_tokens=200)
    chat.invoke(QUESTION)
    ticks = 0
    longest = 0.0

    async def tick() -> None:
        nonlocal ticks, longest
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(0.01)
            ticks, longest, last = ticks + 1, max(longest, loop.time() - last), loop.time()

    ticker = asyncio.create_task(tick())
    started = asyncio.get_running_loop().time()
    await chat.ainvoke("A question that was not asked before?")
    took = asyncio.get_running_loop().time() - started
    ticker.cancel()
    # Cores are shared with the generating thread: a tick may be late, but none waits for the answer.
    assert ticks >= 10
    assert longest < max(0.25, took / 2)


async def test_concurrent_calls_each_get_their_own_answer(chat: ChatRAGKVCache) -> None:
    questions = [f"Question {i}: how long?" for i in range(8)]
    expected = [chat.bind(reuse="off").invoke(q).content for q in questions]
    answers = await asyncio.gather(*(chat.ainvoke(q) for q in questions))
    assert [a.content for a in answers] == expected


async def test_batches_are_in_order(chat: ChatRAGKVCache) -> None:
    questions = [f"{'word ' * (i * 7)}Question {i}?" for i in range(8)]
    expected = [chat.bind(reuse="off").invoke(q).content for q in questions]
    assert [a.content for a in chat.batch(questions)] == expected
    assert [a.content for a in await chat.abatch(questions, {"max_concurrency": 2})] == expected
    half_cached = [q + " More?" if i % 2 else q for i, q in enumerate(questions)]
    expected = [chat.bind(reuse="off").invoke(q).content for q in half_cached]
    assert [a.content for a in chat.batch(half_cached)] == expected


def test_an_abandoned_stream_frees_the_engine(engine: Engine) -> None:
    chat = ChatRAGKVCache(engine=engine, temperature=0, max_new_tokens=400)
    stream = chat.stream(QUESTION)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert chat.bind(max_new_tokens=2).invoke(QUESTION).usage_metadata["output_tokens"] == 2


async def test_an_abandoned_async_stream_frees_the_engine(engine: Engine) -> None:
    chat = ChatRAGKVCache(engine=engine, temperature=0, max_new_tokens=400)
    stream = chat.astream(QUESTION)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    answer = await asyncio.wait_for(chat.bind(max_new_tokens=2).ainvoke(QUESTION), 30)
    assert answer.usage_metadata["output_tokens"] == 2


async def test_a_cancelled_call_frees_the_engine(engine: Engine) -> None:
    chat = ChatRAGKVCache(engine=engine, temperature=0, max_new_tokens=400)
    task = asyncio.create_task(chat.ainvoke(QUESTION))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answer = await asyncio.wait_for(chat.bind(max_new_tokens=2).ainvoke(QUESTION), 30)
    assert answer.usage_metadata["output_tokens"] == 2


async def test_events(chat: ChatRAGKVCache) -> None:
    events = [e async for e in chat.astream_events(QUESTION, version="v2")]
    text = "".join(e["data"]["chunk"].text for e in events if e["event"] == "on_chat_model_stream")
    assert text == chat.invoke(QUESTION).content
    assert events[-1]["data"]["output"].response_metadata["rag_kvcache"]["link"]


def test_wrong_types_and_templates(engine: Engine, chat: ChatRAGKVCache) -> None:
    image = HumanMessage([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}])
    with pytest.raises(InvalidTypeError, match="text only"):
        chat.invoke([image])
    with pytest.raises(InvalidTypeError, match="unknown argument"):
        chat.bind(max_length=3).invoke(QUESTION)
    with pytest.raises(NotImplementedError):
        chat.bind_tools([])
    with pytest.raises(ValidationError, match=r"rag_kvcache\.Engine"):
        ChatRAGKVCache(engine="gpt2")
    with pytest.raises(ValidationError, match="max_length"):
        ChatRAGKVCache(engine=engine, max_length=3)
    with pytest.raises(ValidationError):
        ChatRAGKVCache(engine=engine, temperature=-1)


def test_a_tokenizer_without_template() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    with Engine(tiny_model(), tokenizer) as engine, pytest.raises(ChatTemplateError):
        ChatRAGKVCache(engine=engine).invoke(QUESTION)


def test_a_template_without_tools() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with Engine(tiny_model(), tokenizer) as engine, pytest.raises(ChatTemplateError, match="no tools"):
        ChatRAGKVCache(engine=engine).invoke([HumanMessage("?"), ToolMessage("!", tool_call_id="1")])


def test_copies_share_the_engine_and_nothing_serialises_it(chat: ChatRAGKVCache, engine: Engine) -> None:
    for twin in (copy.copy(chat), copy.deepcopy(chat), chat.model_copy(), chat.model_copy(deep=True)):
        assert twin.engine is engine
        assert twin.temperature == 0
    assert chat.bind(max_tokens=3).bound.engine is engine
    assert chat.with_config(tags=["x"]).bound.engine is engine
    assert chat.with_retry().bound.engine is engine
    assert "engine" not in chat.model_dump()
    assert "Engine" not in repr(chat)
    assert chat.model_copy(update={"temperature": 1.0}).temperature == 1.0
    assert chat.temperature == 0


def test_around_a_text_model(engine: Engine) -> None:
    llm = RAGKVCacheLLM(engine=engine, temperature=0, max_new_tokens=5, tenant="ann", model_id="name")
    chat = ChatRAGKVCache(llm=llm, max_tokens=3)
    assert chat.engine is engine
    assert (chat.max_new_tokens, chat.temperature, chat.tenant, chat.model_name) == (3, 0, "ann", "name")
    with pytest.raises(ValidationError, match="llm"):
        ChatRAGKVCache(llm="gpt2", engine=engine)


def test_configurable_fields(chat: ChatRAGKVCache) -> None:
    from langchain_core.runnables import ConfigurableField

    configured = chat.configurable_fields(max_new_tokens=ConfigurableField(id="length"))
    answer = configured.with_config(configurable={"length": 2}).invoke(QUESTION)
    assert answer.usage_metadata["output_tokens"] == 2


def test_close(engine: Engine) -> None:
    chat = ChatRAGKVCache(engine=engine)
    chat.close()
    with pytest.raises(EngineClosedError):
        chat.invoke(QUESTION)


def test_counting_tokens(chat: ChatRAGKVCache, engine: Engine) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    answer = chat.invoke(messages)
    assert chat.get_num_tokens_from_messages(messages) == answer.usage_metadata["input_tokens"]
    assert chat.get_num_tokens(QUESTION) == engine.count_tokens(QUESTION) == len(chat.get_token_ids(QUESTION))
    own = ChatRAGKVCache(engine=engine, custom_get_token_ids=lambda text: [1, 2, 3])
    assert own.get_num_tokens(QUESTION) == 3


def test_tracing_parameters(chat: ChatRAGKVCache) -> None:
    params = chat._get_ls_params(stop=["x"], max_tokens=7)
    assert params["ls_provider"] == "rag_kvcache"
    assert params["ls_model_type"] == "chat"
    assert params["ls_max_tokens"] == 7
    assert params["ls_temperature"] == 0
    assert params["ls_stop"] == ["x"]
    assert chat.lc_secrets == {}
    assert chat.profile is not None
    assert chat.profile["max_input_tokens"] == chat.engine.context_window


def test_a_last_chunk_with_text_is_kept(
    chat: ChatRAGKVCache, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = engine.generate(QUESTION)
    monkeypatch.setattr(
        engine, "stream", lambda *a, **k: (c for c in (Chunk("a"), Chunk(""), Chunk("b", generation)))
    )
    assert [c.text for c in chat.stream(QUESTION)] == ["a", "b"]


def test_run_id_is_free_to_choose(chat: ChatRAGKVCache) -> None:
    run = uuid4()
    assert str(run) in str(chat.invoke(QUESTION, {"run_id": run}).id)
