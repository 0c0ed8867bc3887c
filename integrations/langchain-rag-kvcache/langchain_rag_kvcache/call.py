"""The arguments of one call: a model's fields, overridden by what the call binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_rag_kvcache.pipeline_options import from_pipeline_options
from rag_kvcache.errors import InvalidTypeError

#: Arguments of ``engine.generate`` that are fields of the models, and may be bound.
FIELDS = ("max_new_tokens", "temperature", "top_p", "seed", "tenant", "reuse")
ALIASES = {"max_tokens": "max_new_tokens", "stop_sequences": "stop"}
# Said by LangChain or by chains written for HuggingFacePipeline, and true of these models anyway.
_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {"stream": (True, False, None), "skip_prompt": (True, None)}


@dataclass(frozen=True)
class Call:
    """What one call asks for.

    engine: keyword arguments of ``engine.generate`` but the prompt and the documents.
    documents: the documents bound to the call; None when none were.
    """

    engine: Mapping[str, Any]
    documents: Sequence[Any] | None = None


def make_call(fields: Mapping[str, Any], stop: Sequence[str] | str | None, bound: Mapping[str, Any]) -> Call:
    """Merge a model's fields with a call's arguments, which win.

    fields: values of FIELDS, "stop" and "generate_kwargs". ``bound``: what ``.bind`` or ``invoke`` gave.
    Raises InvalidTypeError for arguments that mean nothing here.
    """
    given = normalised(bound)
    for name, harmless in _NO_EFFECT.items():
        if name in given and given.pop(name) not in harmless:
            raise InvalidTypeError(f"{name}=False cannot be served: an answer never repeats its prompt")
    question = given.pop("question", None)
    documents = given.pop("documents", None)
    if stop is None:
        stop = given.pop("stop", None)
    else:
        given.pop("stop", None)
    if stop is None:
        stop = fields.get("stop")
    extra = {**(fields.get("generate_kwargs") or {}), **(given.pop("generate_kwargs", None) or {})}
    unknown = sorted(given.keys() - set(FIELDS))
    if unknown:
        raise InvalidTypeError(
            f"unknown argument{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}: these models take "
            f"stop, documents, question, generate_kwargs, {', '.join(FIELDS)}; other generation options of "
            "transformers go into generate_kwargs={...}"
        )
    engine = {name: given.get(name, fields.get(name)) for name in FIELDS}
    engine["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    engine["question"] = question
    engine["generate_kwargs"] = extra or None
    return Call(engine, documents)


def normalised(bound: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments under their own names: aliases and pipeline_kwargs resolved, those that are None left out.

    ``documents`` stays even when empty: it says that there are none.
    """
    given = {ALIASES.get(name, name): value for name, value in bound.items() if value is not None}
    options = given.pop("pipeline_kwargs", None)
    if options:
        mapped = from_pipeline_options(options)
        extra = {**mapped.generate_kwargs, **(given.get("generate_kwargs") or {})}
        given = {**mapped.fields, **given}
        if extra:
            given["generate_kwargs"] = extra
    return given
