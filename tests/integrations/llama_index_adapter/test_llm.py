"""The LLM called directly: what it takes, what it returns, and that it does not block."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.llms.rag_kvcache import RAGKVCacheLLM
from llama_index.llms.rag_kvcache.retrieved import RetrievedEvents, RetrievedSpans

from rag_kvcache.engine import Engine
from rag_kvcache.errors import ConfigurationError, InvalidTypeError, RequestError
from tests.integrations.llama_index_adapter.recording import KETTLE, RecordingEngine
from tests.tiny import tiny_model, tiny_tokenizer

HUGGINGFACE_PARAMETERS = [
    *("context_window", "max_new_tokens", "query_wrapper_prompt", "tokenizer_name", "model_name", "model"),
    *("tokenizer", "device_map", "stopping_ids", "tokenizer_kwargs", "tokenizer_outputs_to_remove"),
    *("model_kwargs", "generate_kwargs", "is_chat_model", "callback_manager", "system_prompt"),
    *("messages_to_prompt", "completion_to_prompt", "pydantic_program_mode", "output_parser"),
]
MESSAGES = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content="How long?")]
DICTS = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How long?"}]


class TestConstructor:
    def test_takes_huggingface_llms_parameters_in_their_order(self) -> None:
        names = list(inspect.signature(RAGKVCacheLLM.__init__).parameters)[1:]
        assert names[: len(HUGGINGFACE_PARAMETERS)] == HUGGINGFACE_PARAMETERS

    def test_wraps_a_loaded_model(self) -> None:
        with RAGKVCacheLLM(
            model=tiny_model(), tokenizer=tiny_tokenizer(), max_new_tokens=3, max_bytes="8MB"
        ) as llm:
            assert llm.engine.settings.max_bytes == 8_000_000
            assert llm.complete("foo bar").additional_kwargs["completion_tokens"] == 3

    def test_defaults_come_from_the_model(self, llm: RAGKVCacheLLM, engine: RecordingEngine) -> None:
        assert llm.metadata.context_window == engine.context_window == 4096
        assert llm.metadata.num_output == 8
        assert llm.metadata.is_chat_model
        assert llm.metadata.model_name == engine.model_name

    def test_is_chat_model_follows_the_tokenizer(self) -> None:
        tokenizer = tiny_tokenizer.__wrapped__()
        tokenizer.chat_template = None
        assert not RAGKVCacheLLM(model=tiny_model(), tokenizer=tokenizer).metadata.is_chat_model

    def test_context_window_is_at_most_the_models(self, engine: RecordingEngine) -> None:
        assert RAGKVCacheLLM(context_window=512, engine=engine).metadata.context_window == 512
        assert RAGKVCacheLLM(context_window=10**6, engine=engine).metadata.context_window == 4096

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({}, "model_name"),
            ({"model": tiny_model, "tokenizer": None}, "tokenizer="),
            ({"engine": True, "max_bytes": 1}, "settings="),
            ({"engine": True, "tokenizer_kwargs": {"a": 1}}, "tokenizer_kwargs="),
            ({"engine": True, "reuse": "sometimes"}, "exact"),
            ({"engine": True, "tokenizer_outputs_to_remove": ["input_ids"]}, "input_ids"),
            ({"engine": True, "generate_kwargs": {"max_new_tokens": 3}}, "max_new_tokens="),
            ({"engine": True, "generate_kwargs": {"past_key_values": 3}}, "cache"),
            ({"engine": True, "generate_kwargs": {"temprature": 3}}, "temprature"),
            ({"engine": True, "temperature": -1}, "temperature=-1"),
            ({"engine": True, "context_window": 0}, "context_window=0"),
            ({"model": tiny_model, "tokenizer": tiny_tokenizer, "max_byte": 3}, "max_byte"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused(
        self, arguments: dict[str, Any], says: str, engine: RecordingEngine
    ) -> None:
        if "engine" in arguments:
            arguments = arguments | {"engine": engine}
        arguments = {k: v() if k in ("model", "tokenizer") and v else v for k, v in arguments.items()}
        with pytest.raises(ConfigurationError, match=says):
            RAGKVCacheLLM(**arguments)

    def test_handlers_are_registered_once(self, engine: RecordingEngine) -> None:
        for _ in range(3):
            RAGKVCacheLLM(engine=engine)
        root = get_dispatcher()
        assert sum(isinstance(h, RetrievedSpans) for h in root.span_handlers) == 1
        assert sum(isinstance(h, RetrievedEvents) for h in root.event_handlers) == 1

    def test_serialises_without_model_or_secrets(self, engine: RecordingEngine) -> None:
        llm = RAGKVCacheLLM(
            model=tiny_model(),
            tokenizer=tiny_tokenizer(),
            model_kwargs={"token": "hf_x"},
            reuse="off",
            max_entries=9,
        )
        data = json.loads(llm.to_json())
        assert data["class_name"] == "RAGKVCache_LLM"
        assert data["reuse"] == "off"
        assert data["settings"] == {"max_entries": 9}
        assert "hf_x" not in llm.to_json()
        again = RAGKVCacheLLM.from_dict(
            {k: v for k, v in data.items() if k != "settings"}, engine=engine, model_kwargs=None
        )
        assert again.reuse == "off"
        assert again.engine is engine

    def test_close_leaves_a_passed_engine_open(self, llm: RAGKVCacheLLM) -> None:
        llm.close()
        assert llm.complete("foo").text


class TestPrompts:
    def test_complete_passes_the_text_as_it_is(self, llm: RAGKVCacheLLM, engine: RecordingEngine) -> None:
        llm.complete("foo bar")
        assert engine.calls[-1][0] == "foo bar"

    @pytest.mark.parametrize("method", ["complete", "stream_complete", "acomplete", "astream_complete"])
    def test_wrapper_system_and_completion_prompts_in_every_path(
        self, method: str, engine: RecordingEngine
    ) -> None:
        wrapped = RAGKVCacheLLM(engine=engine, query_wrapper_prompt="<<{query_str}>>", system_prompt="SYS")
        run(getattr(wrapped, method)("q"))
        assert engine.calls[-1][0] == "SYS <<q>>"
        own = RAGKVCacheLLM(
            engine=engine,
            query_wrapper_prompt=PromptTemplate("<<{query_str}>>"),
            completion_to_prompt=lambda text: f"[{text}]",
        )
        run(getattr(own, method)("q"))
        assert engine.calls[-1][0] == "[<<q>>]"
        run(getattr(own, method)("q", formatted=True))
        assert engine.calls[-1][0] == "q"

    @pytest.mark.parametrize("method", ["chat", "stream_chat", "achat", "astream_chat"])
    def test_chat_goes_through_the_template_unless_told_otherwise(
        self, method: str, engine: RecordingEngine
    ) -> None:
        run(getattr(RAGKVCacheLLM(engine=engine), method)(MESSAGES))
        assert engine.calls[-1][0] == DICTS
        own = RAGKVCacheLLM(
            engine=engine, messages_to_prompt=lambda ms: "|".join(m.content or "" for m in ms)
        )
        run(getattr(own, method)(MESSAGES))
        assert engine.calls[-1][0] == "Be short.|How long?"

    def test_a_chat_prompt_for_complete_is_the_templates_text(self, engine: RecordingEngine) -> None:
        llm = RAGKVCacheLLM(engine=engine, is_chat_model=False)
        rendered = tiny_tokenizer().apply_chat_template(DICTS, tokenize=False, add_generation_prompt=True)
        assert llm.messages_to_prompt(MESSAGES) == rendered
        assert llm.complete(rendered, formatted=True).text == llm.chat(MESSAGES).message.content

    def test_wrong_types(self, llm: RAGKVCacheLLM) -> None:
        with pytest.raises(InvalidTypeError, match=r"chat\(\)"):
            llm.complete(MESSAGES)  # type: ignore[arg-type]
        with pytest.raises(InvalidTypeError, match="ChatMessage"):
            llm.chat([{"role": "user", "content": "x"}])  # type: ignore[list-item]
        with pytest.raises(InvalidTypeError, match="max_token"):
            llm.complete("foo", max_token=3)
        with pytest.raises(RequestError, match="max_new_tokens="):
            llm.complete("foo", generate_kwargs={"max_length": 3})


class TestCalls:
    def test_options_of_a_call(self, engine: RecordingEngine) -> None:
        llm = RAGKVCacheLLM(engine=engine, tenant="a", temperature=0.0, generate_kwargs={"top_k": 5})
        llm.complete("foo")
        assert engine.calls[-1][1] == {
            "documents": (),
            "question": None,
            "tenant": "a",
            "reuse": None,
            "max_new_tokens": None,
            "temperature": 0.0,
            "top_p": None,
            "seed": None,
            "stop": (),
            "generate_kwargs": {"top_k": 5},
        }
        llm.complete(
            f"{KETTLE} foo?",
            max_tokens=2,
            tenant="b",
            reuse="off",
            temperature=0.7,
            seed=3,
            stop=["x"],
            documents=[TextNode(text=KETTLE, id_="k")],
            question="foo?",
            generate_kwargs={"repetition_penalty": 1.1, "stop_strings": "y"},
        )
        arguments = engine.calls[-1][1]
        assert arguments["documents"][0].id == "k"
        assert arguments["stop"] == ("x", "y")
        assert arguments["generate_kwargs"] == {"top_k": 5, "repetition_penalty": 1.1}
        said = {"max_new_tokens": 2, "tenant": "b", "reuse": "off", "temperature": 0.7, "seed": 3}
        assert arguments.items() >= (said | {"question": "foo?"}).items()

    def test_explicit_temperature_beats_generate_kwargs(self, engine: RecordingEngine) -> None:
        llm = RAGKVCacheLLM(engine=engine, generate_kwargs={"temperature": 5.0, "do_sample": True})
        assert llm.complete("foo bar", temperature=0).text == llm.complete("foo bar", temperature=0).text

    def test_stopping_ids_end_the_answer(self, engine: RecordingEngine) -> None:
        ids = RAGKVCacheLLM(engine=engine).complete("foo bar").raw["token_ids"]
        stopped = RAGKVCacheLLM(engine=engine, stopping_ids=[ids[2]]).complete("foo bar")
        assert stopped.raw["token_ids"] == ids[: ids.index(ids[2]) + 1]
        assert stopped.raw["finish_reason"] == "stop"

    def test_tokenizer_outputs_to_remove(self, engine: RecordingEngine) -> None:
        llm = RAGKVCacheLLM(engine=engine, tokenizer_outputs_to_remove=["token_type_ids"])
        assert llm.complete("foo bar").text == RAGKVCacheLLM(engine=engine).complete("foo bar").text

    def test_usage_and_report(self, llm: RAGKVCacheLLM) -> None:
        prompt = f"Context: {KETTLE}\nQuestion: how long?"
        response = llm.complete(prompt, documents=[KETTLE])
        again = llm.complete(prompt, documents=[KETTLE])
        assert again.text == response.text
        assert not response.text.startswith("Context")
        extra = again.additional_kwargs
        assert extra["rag_kvcache"]["link"] == "call"
        assert extra["cached_tokens"] == extra["rag_kvcache"]["reused_tokens"] > 0.8 * extra["prompt_tokens"]
        assert extra["total_tokens"] == extra["prompt_tokens"] + extra["completion_tokens"]
        assert again.raw["usage"]["prompt_tokens"] == extra["prompt_tokens"]
        assert llm.chat(MESSAGES).additional_kwargs["rag_kvcache"]["mode"] == "exact"
        json.dumps(extra)

    def test_streams_join_to_the_whole(self, llm: RAGKVCacheLLM) -> None:
        pieces = list(llm.stream_complete("foo bar"))
        assert len(pieces) > 1
        assert "".join(p.delta or "" for p in pieces) == pieces[-1].text == llm.complete("foo bar").text
        assert "rag_kvcache" in pieces[-1].additional_kwargs
        assert not pieces[0].additional_kwargs
        turns = list(llm.stream_chat(MESSAGES))
        assert len(turns) > 1
        assert "".join(p.delta or "" for p in turns) == turns[-1].message.content
        assert turns[-1].message.content == llm.chat(MESSAGES).message.content
        assert "rag_kvcache" in turns[-1].additional_kwargs

    def test_async_equals_sync(self, llm: RAGKVCacheLLM) -> None:
        async def both() -> tuple[str, str, str, str]:
            done = await llm.acomplete("foo bar")
            pieces = [p.delta or "" async for p in await llm.astream_complete("foo bar")]
            turn = await llm.achat(MESSAGES)
            turns = [p.delta or "" async for p in await llm.astream_chat(MESSAGES)]
            assert len(pieces) > 1
            assert len(turns) > 1
            return done.text, "".join(pieces), turn.message.content or "", "".join(turns)

        text, streamed, answer, answer_streamed = asyncio.run(both())
        assert text == streamed == llm.complete("foo bar").text
        assert answer == answer_streamed == llm.chat(MESSAGES).message.content

    def test_async_is_its_own(self) -> None:
        for name in ("acomplete", "achat", "astream_complete", "astream_chat"):
            assert getattr(RAGKVCacheLLM, name) is not getattr(CustomLLM, name)

    @pytest.mark.parametrize("method", ["acomplete", "astream_complete"])
    def test_event_loop_keeps_ticking(self, method: str) -> None:
        llm = RAGKVCacheLLM(
            model=tiny_model(num_hidden_layers=12), tokenizer=tiny_tokenizer(), max_new_tokens=60
        )

        async def ticks_during_a_call() -> tuple[int, float]:
            loop = asyncio.get_running_loop()
            ticks: list[float] = []

            async def tick() -> None:
                while True:
                    ticks.append(loop.time())
                    await asyncio.sleep(0.01)

            ticker = asyncio.create_task(tick())
            start = loop.time()
            result = await getattr(llm, method)("foo bar")
            if method == "astream_complete":
                async for _ in result:
                    pass
            seconds = loop.time() - start
            ticker.cancel()
            return len(ticks), seconds

        ticks, seconds = asyncio.run(ticks_during_a_call())
        assert ticks >= 0.1 * seconds / 0.01, f"{ticks} ticks in {seconds:.2f} s"
        assert ticks > 3

    def test_an_abandoned_stream_frees_the_model(self, llm: RAGKVCacheLLM, engine: Engine) -> None:
        pieces = llm.stream_complete("foo bar", max_new_tokens=500)
        next(pieces)
        pieces.close()
        assert llm.complete("foo bar").text


def run(result: Any) -> None:
    """Exhaust whatever a method returned."""

    async def exhaust(waiting: Any) -> None:
        done = await waiting
        if hasattr(done, "__aiter__"):
            async for _ in done:
                pass

    if inspect.isawaitable(result):
        asyncio.run(exhaust(result))
    elif inspect.isgenerator(result):
        list(result)
