"""``pipeline_kwargs`` and bound arguments on the engine's arguments."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_rag_kvcache.call import make_call
from langchain_rag_kvcache.pipeline_options import from_pipeline_options
from rag_kvcache.errors import ConfigurationError, InvalidTypeError


@pytest.mark.parametrize(
    ("options", "fields", "rest"),
    [
        ({"max_new_tokens": 5, "return_full_text": False}, {"max_new_tokens": 5}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": 50}, {"temperature": 0.0}, {}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}, {"do_sample": True}),
        ({"repetition_penalty": 1.03, "top_k": 50}, {}, {"repetition_penalty": 1.03, "top_k": 50}),
        ({"stop_sequence": "\n", "batch_size": 8, "temperature": None}, {"stop": ["\n"]}, {}),
        ({"stop_strings": ["a", "b"]}, {"stop": ["a", "b"]}, {}),
    ],
)
def test_pipeline_options_are_mapped(options: Any, fields: Any, rest: Any) -> None:
    mapped = from_pipeline_options(options)
    assert (mapped.fields, mapped.generate_kwargs) == (fields, rest)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"return_full_text": True}, "never repeats"),
        ({"max_length": 100}, "max_new_tokens"),
        ({"num_return_sequences": 2}, "batch"),
        ({"truncation": True}, "retrieve fewer"),
        ({"use_cache": False}, "reuse='off'"),
        ({"streamer": object()}, "stream()"),
        ({"device": 0}, "from_model_id"),
        ({"do_sample": True, "temperature": 0}, "do_sample=False"),
        ("max_new_tokens", "dict"),
    ],
)
def test_what_cannot_be_honoured_says_what_to_do(options: Any, instead: str) -> None:
    with pytest.raises(ConfigurationError, match=instead.replace("(", r"\(").replace(")", r"\)")):
        from_pipeline_options(options)


FIELDS = {
    "max_new_tokens": 9,
    "temperature": 0.5,
    "stop": ["x"],
    "generate_kwargs": {"top_k": 5},
    "tenant": "a",
}


def test_fields_are_the_defaults() -> None:
    call = make_call(FIELDS, None, {})
    assert call.engine == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": None,
        "seed": None,
        "tenant": "a",
        "reuse": None,
        "stop": ("x",),
        "question": None,
        "generate_kwargs": {"top_k": 5},
    }
    assert call.documents is None


def test_bound_arguments_win() -> None:
    bound = {
        "max_tokens": 3,
        "temperature": 0,
        "tenant": "b",
        "reuse": "off",
        "question": "why?",
        "documents": [],
        "generate_kwargs": {"repetition_penalty": 1.1},
        "stream": True,
        "skip_prompt": True,
    }
    call = make_call(FIELDS, ["y"], bound)
    assert call.engine["max_new_tokens"] == 3
    assert call.engine["temperature"] == 0
    assert call.engine["tenant"] == "b"
    assert call.engine["reuse"] == "off"
    assert call.engine["question"] == "why?"
    assert call.engine["stop"] == ("y",)
    assert call.engine["generate_kwargs"] == {"top_k": 5, "repetition_penalty": 1.1}
    assert call.documents == []


def test_bound_pipeline_kwargs() -> None:
    call = make_call(
        FIELDS, None, {"pipeline_kwargs": {"max_new_tokens": 4, "do_sample": False, "num_beams": 1}}
    )
    assert call.engine["max_new_tokens"] == 4
    assert call.engine["temperature"] == 0
    assert call.engine["generate_kwargs"] == {"top_k": 5, "num_beams": 1}


def test_an_explicit_empty_stop_replaces_the_default() -> None:
    assert make_call(FIELDS, [], {}).engine["stop"] == ()


@pytest.mark.parametrize(
    "bound", [{"max_length": 3}, {"tools": [{}]}, {"skip_prompt": False}, {"model": "other"}]
)
def test_unknown_arguments_are_refused(bound: dict[str, Any]) -> None:
    with pytest.raises(InvalidTypeError):
        make_call(FIELDS, None, bound)
