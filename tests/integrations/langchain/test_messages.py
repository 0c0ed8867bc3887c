"""LangChain messages as role/content dicts."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_rag_kvcache.messages import to_chat
from rag_kvcache.errors import InvalidTypeError


def test_roles() -> None:
    messages = [
        SystemMessage("s"),
        HumanMessage("u", name="ann"),
        AIMessage("a"),
        ChatMessage("d", role="developer"),
        ToolMessage("t", tool_call_id="1"),
    ]
    assert to_chat(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "name": "ann"},
        {"role": "assistant", "content": "a"},
        {"role": "developer", "content": "d"},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]


def test_tool_calls_are_passed_on() -> None:
    call = {"name": "find", "args": {"q": "kettle"}, "id": "7", "type": "tool_call"}
    (turn,) = to_chat([AIMessage([{"type": "tool_use", "id": "7"}], tool_calls=[call])])
    assert turn["content"] == ""
    assert turn["tool_calls"] == [
        {"type": "function", "id": "7", "function": {"name": "find", "arguments": {"q": "kettle"}}}
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
        (["one ", "two"], "one two"),
        ([], ""),
    ],
)
def test_text_parts_are_joined(content: Any, text: str) -> None:
    assert to_chat([HumanMessage(content)]) == [{"role": "user", "content": text}]


def test_earlier_reasoning_is_left_out() -> None:
    parts = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "yes"}]
    assert to_chat([AIMessage(parts)]) == [{"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]),
        HumanMessage([{"type": "audio", "base64": "AA=="}]),
        HumanMessage([{"type": "reasoning", "reasoning": "hm"}]),
        RemoveMessage(id="1"),
    ],
)
def test_what_is_no_text_is_refused(message: BaseMessage) -> None:
    with pytest.raises(InvalidTypeError):
        to_chat([message])
