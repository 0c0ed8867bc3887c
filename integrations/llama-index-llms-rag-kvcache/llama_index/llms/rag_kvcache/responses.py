"""Generations as LlamaIndex responses."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from rag_kvcache.report import Generation, Report
from rag_kvcache.segment import SegmentKind


def link_of(report: Report, documents_from: str) -> str:
    """How the engine came to know the documents that it found in the prompt.

    "call" (the caller named them), "run" (retrieved by the query around the call), "registry" (texts seen
    earlier), "block" (no document found, but token blocks), "none".
    """
    kinds = {segment.kind for segment in report.segments}
    if SegmentKind.DOCUMENT in kinds:
        return documents_from
    return "block" if SegmentKind.BLOCK in kinds else "none"


def details(generation: Generation, documents_from: str) -> dict[str, Any]:
    """Token counts and the reuse report, for ``additional_kwargs``."""
    usage = generation.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "cached_tokens": usage.cached_tokens,
        "rag_kvcache": generation.report.to_dict() | {"link": link_of(generation.report, documents_from)},
    }


def completion(
    text: str, delta: str | None, generation: Generation | None, documents_from: str
) -> CompletionResponse:
    """A whole completion (``delta`` None), or one piece of a streamed one."""
    if generation is None:
        return CompletionResponse(text=text, delta=delta)
    extra = details(generation, documents_from)
    usage = {name: value for name, value in extra.items() if name != "rag_kvcache"}
    raw = {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "usage": usage,
        "rag_kvcache": extra["rag_kvcache"],
    }
    return CompletionResponse(text=text, delta=delta, additional_kwargs=extra, raw=raw)


def chat(answer: CompletionResponse) -> ChatResponse:
    """The same as an assistant's message."""
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=answer.text),
        delta=answer.delta,
        raw=answer.raw,
        additional_kwargs=answer.additional_kwargs,
    )
