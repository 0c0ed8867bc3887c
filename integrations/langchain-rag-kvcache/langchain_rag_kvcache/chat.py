"""The chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from pydantic import model_validator

from langchain_rag_kvcache.backed import STRICT, EngineBacked, report_of, usage_of
from langchain_rag_kvcache.call import ALIASES, Call
from langchain_rag_kvcache.link import Candidates, candidates, parent_run
from langchain_rag_kvcache.llm import RAGKVCacheLLM
from langchain_rag_kvcache.messages import to_chat
from rag_kvcache.report import Chunk, Generation


class ChatRAGKVCache(EngineBacked, BaseChatModel):
    """A Hugging Face chat model that reuses the KV cache of documents it has read before.

        llm = ChatRAGKVCache.from_model_id("HuggingFaceTB/SmolLM2-135M-Instruct")
        chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | llm

    The documents that the chain's retriever returned are found by themselves. Results tell what was
    reused: ``usage_metadata["input_token_details"]["cache_read"]`` and
    ``response_metadata["rag_kvcache"]``.

    ``ChatRAGKVCache(llm=RAGKVCacheLLM(...))`` shares a text model's engine and fields.

    A call may bind: max_new_tokens (or max_tokens), temperature, top_p, seed, stop, tenant, reuse,
    generate_kwargs, documents, question.
    """

    model_config = STRICT

    streaming: bool = False
    """Stream also where ``invoke`` is called, so that callbacks see each token."""

    @model_validator(mode="before")
    @classmethod
    def _around_a_text_model(cls, values: Any) -> Any:
        """``ChatRAGKVCache(llm=...)``, as one writes ``ChatHuggingFace(llm=HuggingFacePipeline(...))``."""
        if not isinstance(values, dict) or not isinstance(values.get("llm"), RAGKVCacheLLM):
            return values
        llm: RAGKVCacheLLM = values["llm"]
        shared = {name: getattr(llm, name) for name in EngineBacked.model_fields}
        given = {name: value for name, value in values.items() if name != "llm"}
        return {**shared, **{ALIASES.get(name, name): value for name, value in given.items()}}

    @property
    def _llm_type(self) -> str:
        return "rag-kvcache-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._langsmith("chat", stop, kwargs)

    def _resolve_model_profile(self) -> Any:
        return {
            "name": self.model_name,
            "max_input_tokens": self.engine.context_window,
            "text_inputs": True,
            "text_outputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "tool_calling": False,
            "structured_output": False,
        }

    def _engine_prompt(self, value: PromptValue) -> list[dict[str, Any]]:
        return to_chat(value.to_messages())

    def _prepared(
        self, messages: list[BaseMessage], stop: list[str] | None, run_manager: Any, bound: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], Candidates]:
        call: Call = self._call(stop, bound)
        prompt = to_chat(messages)
        found = candidates(given=call.documents, parents=(parent_run(run_manager),), messages=messages)
        return prompt, self._engine_arguments(call, found), found

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt, arguments, found = self._prepared(messages, stop, run_manager, kwargs)
        return self._result(self.engine.generate(prompt, **arguments), found)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt, arguments, found = self._prepared(messages, stop, run_manager, kwargs)
        return self._result(await self.engine.agenerate(prompt, **arguments), found)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        prompt, arguments, found = self._prepared(messages, stop, run_manager, kwargs)
        with closing(self.engine.stream(prompt, **arguments)) as chunks:
            for chunk in chunks:
                if chunk.text or chunk.generation:
                    part = self._part(chunk, found)
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=part)
                    yield part

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        prompt, arguments, found = self._prepared(messages, stop, run_manager, kwargs)
        async with aclosing(self.engine.astream(prompt, **arguments)) as chunks:
            async for chunk in chunks:
                if chunk.text or chunk.generation:
                    part = self._part(chunk, found)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=part)
                    yield part

    def _result(self, generation: Generation, found: Candidates) -> ChatResult:
        message = AIMessage(
            content=generation.text,
            usage_metadata=usage_of(generation),
            response_metadata=self._metadata(generation, found),
        )
        info = {"finish_reason": generation.finish_reason}
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])

    def _part(self, chunk: Chunk, found: Candidates) -> ChatGenerationChunk:
        if chunk.generation is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=chunk.text))
        message = AIMessageChunk(
            content=chunk.text,
            usage_metadata=usage_of(chunk.generation),
            response_metadata=self._metadata(chunk.generation, found),
            chunk_position="last",
        )
        info = {"finish_reason": chunk.generation.finish_reason}
        return ChatGenerationChunk(message=message, generation_info=info)

    def _metadata(self, generation: Generation, found: Candidates) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "finish_reason": generation.finish_reason,
            "rag_kvcache": report_of(generation, found),
        }
