"""A checked request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypedDict, get_args

from rag_kvcache.errors import EmptyPromptError, InvalidTypeError, RequestError
from rag_kvcache.segment import Document
from rag_kvcache.settings import Reuse, Settings

Prompt = str | Sequence[Mapping[str, Any]]
"""Text, or chat messages: mappings with "role" and "content"."""


class AnswerOptions(TypedDict, total=False):
    """The keyword arguments of ``Engine.answer``; what each means stands at ``Engine.generate``."""

    tenant: str | None
    max_new_tokens: int | None
    stop: str | Sequence[str]
    temperature: float | None
    top_p: float | None
    seed: int | None
    reuse: str | None
    generate_kwargs: Mapping[str, Any] | None


class Options(AnswerOptions, total=False):
    """The keyword arguments of ``Engine.generate``."""

    documents: Iterable[Document | str]
    question: str | None


@dataclass(frozen=True)
class Request:
    """What one call asks for, its defaults filled in from the settings."""

    prompt: str | tuple[Mapping[str, Any], ...]
    documents: tuple[Document, ...]
    question: str | None
    tenant: str
    max_new_tokens: int
    max_is_default: bool
    stop: tuple[str, ...]
    temperature: float | None
    top_p: float | None
    seed: int | None
    reuse: Reuse
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)


def check_request(
    settings: Settings,
    prompt: Prompt,
    *,
    documents: Iterable[Document | str] = (),
    question: str | None = None,
    tenant: str | None = None,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    reuse: str | None = None,
    generate_kwargs: Mapping[str, Any] | None = None,
) -> Request:
    """Check types and ranges. Raises InvalidTypeError, EmptyPromptError or RequestError."""
    _is(question, str | None, "question")
    stops = (stop,) if isinstance(stop, str) else tuple(_iterable(stop, "stop"))
    for s in stops:
        _is(s, str, "stop")
        _require(s != "", "stop strings must not be empty")
    if max_new_tokens is not None:
        _is_int(max_new_tokens, "max_new_tokens")
        _require(max_new_tokens > 0, f"max_new_tokens must be at least 1, not {max_new_tokens}")
    _is(temperature, Real | None, "temperature")
    _require(temperature is None or temperature >= 0, f"temperature must be 0 or more, not {temperature}")
    _is(top_p, Real | None, "top_p")
    _require(top_p is None or 0 < top_p <= 1, f"top_p must be in (0, 1], not {top_p}")
    if seed is not None:
        _is_int(seed, "seed")
        _require(-(2**63) <= seed < 2**64, f"seed must fit into 64 bits, not {seed}")
    mode = settings.reuse if reuse is None else reuse
    _require(mode in get_args(Reuse), f"reuse must be one of {', '.join(get_args(Reuse))}, not {mode!r}")
    _is(generate_kwargs, Mapping | None, "generate_kwargs")
    return Request(
        prompt=check_prompt(prompt),
        documents=check_documents(documents),
        question=question,
        tenant=check_tenant(tenant, settings),
        max_new_tokens=settings.max_new_tokens if max_new_tokens is None else max_new_tokens,
        max_is_default=max_new_tokens is None,
        stop=stops,
        temperature=None if temperature is None else float(temperature),
        top_p=None if top_p is None else float(top_p),
        seed=seed,
        reuse=mode,  # type: ignore[arg-type]  # checked above
        generate_kwargs=dict(generate_kwargs or {}),
    )


def check_tenant(tenant: str | None, settings: Settings) -> str:
    """The tenant of a request, the settings' one by default."""
    _is(tenant, str | None, "tenant")
    _require(tenant != "", "tenant must not be empty")
    return settings.tenant if tenant is None else tenant


def check_question(question: str) -> None:
    """A question that must be there."""
    _is(question, str, "question")
    _require(bool(question.strip()), "the question is empty")


def check_documents(documents: Iterable[Document | str]) -> tuple[Document, ...]:
    """Documents, plain strings wrapped."""
    if isinstance(documents, str | Document):
        raise InvalidTypeError("documents must be an iterable of Documents or strings, not a single one")
    return tuple(_document(d) for d in _iterable(documents, "documents"))


def _document(value: object) -> Document:
    if isinstance(value, str):
        return Document(value)
    if isinstance(value, Document):
        _is(value.text, str, "Document.text")
        return value
    raise InvalidTypeError(f"documents must be Documents or strings, not {type(value).__name__}")


def check_prompt(prompt: Prompt) -> str | tuple[Mapping[str, Any], ...]:
    """Text as it is; messages with their content flattened to one string each."""
    if isinstance(prompt, str):
        if not prompt:
            raise EmptyPromptError("the prompt is empty")
        return prompt
    messages = tuple(_iterable(prompt, "prompt"))
    if not messages:
        raise EmptyPromptError("the prompt has no messages")
    return tuple(_message(m) for m in messages)


def _message(message: object) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidTypeError(f'a message must be a mapping with "role" and "content", not {message!r:.80}')
    return {**message, "content": _content(message.get("content"))}


def _content(content: object) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case [*parts]:
            return "".join(_part(p) for p in parts)
        case _:
            raise InvalidTypeError(f"message content must be text, not {type(content).__name__}")


def _part(part: object) -> str:
    match part:
        case str():
            return part
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise InvalidTypeError(f"only text content is supported, not {part!r:.80}")


def _iterable(value: Any, name: str) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise InvalidTypeError(f"{name} must be iterable, not {type(value).__name__}") from None


def _is(value: object, kind: Any, name: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = getattr(kind, "__name__", str(kind))
        raise InvalidTypeError(f"{name} must be {wanted}, not {type(value).__name__}")


def _is_int(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be an int, not {type(value).__name__}")


def _require(good: bool, message: str) -> None:
    if not good:
        raise RequestError(message)
