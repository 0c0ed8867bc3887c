"""The text model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import Any
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation as LangChainGeneration
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue

from langchain_rag_kvcache.backed import STRICT, EngineBacked, report_of, usage_of
from langchain_rag_kvcache.link import Candidates, candidates, parent_run, parents_by_prompt
from rag_kvcache.report import Chunk, Generation

# Carries, inside one call, which prompt came from which run. Not for callers.
_PARENTS = "parents_by_prompt"


class RAGKVCacheLLM(EngineBacked, BaseLLM):
    """A Hugging Face text model that reuses the KV cache of documents it has read before.

    Takes the place of ``HuggingFacePipeline``; see ChatRAGKVCache for what calls may bind. The prompt goes
    to the model as it is, without a chat template. ``generation_info["rag_kvcache"]`` tells what was reused.
    """

    model_config = STRICT

    @property
    def _llm_type(self) -> str:
        return "rag-kvcache"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._langsmith("llm", stop, kwargs)

    def _engine_prompt(self, value: PromptValue) -> str:
        return value.to_string()

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """Answer all prompts, in order."""
        model, rest = self._configured(kwargs)
        rest[_PARENTS] = parents_by_prompt(prompts, callbacks)
        return BaseLLM.generate(model, prompts, stop=stop, callbacks=callbacks, **rest)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """Answer all prompts, in order."""
        model, rest = self._configured(kwargs)
        rest[_PARENTS] = parents_by_prompt(prompts, callbacks)
        return await BaseLLM.agenerate(model, prompts, stop=stop, callbacks=callbacks, **rest)

    def _prepared(
        self, prompt: str, stop: list[str] | None, run_manager: Any, bound: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Candidates]:
        rest = dict(bound)
        known: Mapping[str, tuple[UUID, ...]] = rest.pop(_PARENTS, None) or {}
        call = self._call(stop, rest)
        parents = known.get(prompt) or (parent_run(run_manager),)
        found = candidates(given=call.documents, parents=parents)
        return self._engine_arguments(call, found), found

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        answers = []
        for prompt in prompts:
            arguments, found = self._prepared(prompt, stop, run_manager, kwargs)
            answers.append((self.engine.generate(prompt, **arguments), found))
        return self._result(answers)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        answers = []
        for prompt in prompts:
            arguments, found = self._prepared(prompt, stop, run_manager, kwargs)
            answers.append((await self.engine.agenerate(prompt, **arguments), found))
        return self._result(answers)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        arguments, found = self._prepared(prompt, stop, run_manager, kwargs)
        with closing(self.engine.stream(prompt, **arguments)) as chunks:
            for chunk in chunks:
                if chunk.text or chunk.generation:
                    part = self._part(chunk, found)
                    if run_manager is not None:
                        run_manager.on_llm_new_token(part.text, chunk=part)
                    yield part

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        arguments, found = self._prepared(prompt, stop, run_manager, kwargs)
        async with aclosing(self.engine.astream(prompt, **arguments)) as chunks:
            async for chunk in chunks:
                if chunk.text or chunk.generation:
                    part = self._part(chunk, found)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(part.text, chunk=part)
                    yield part

    def _result(self, answers: list[tuple[Generation, Candidates]]) -> LLMResult:
        usages = [generation.usage for generation, _ in answers]
        return LLMResult(
            generations=[
                [LangChainGeneration(text=generation.text, generation_info=self._info(generation, found))]
                for generation, found in answers
            ],
            llm_output={
                "model_name": self.model_name,
                "token_usage": {
                    "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
                    "completion_tokens": sum(usage.completion_tokens for usage in usages),
                    "total_tokens": sum(usage.total_tokens for usage in usages),
                },
            },
        )

    def _part(self, chunk: Chunk, found: Candidates) -> GenerationChunk:
        info = None if chunk.generation is None else self._info(chunk.generation, found)
        return GenerationChunk(text=chunk.text, generation_info=info)

    def _info(self, generation: Generation, found: Candidates) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "finish_reason": generation.finish_reason,
            "usage_metadata": usage_of(generation),
            "rag_kvcache": report_of(generation, found),
        }
