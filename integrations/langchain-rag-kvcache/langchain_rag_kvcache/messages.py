"""LangChain messages as the role/content dicts that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from rag_kvcache.errors import InvalidTypeError

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
)
# Parts of an assistant's earlier turn that its text does not repeat: the calls are read from
# ``tool_calls``, and chat templates leave earlier reasoning out.
_SILENT_PARTS = {"tool_use", "tool_call", "input_json_delta", "reasoning", "thinking", "redacted_thinking"}


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The messages in the form ``engine.generate`` takes.

    Roles: system, user, assistant, tool, and a ChatMessage's own. The engine raises ChatTemplateError
    where the model's template lacks one.
    """
    return [_to_dict(message) for message in messages]


def _to_dict(message: BaseMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(message), "content": _text(message)}
    if message.name:
        turn["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    raise InvalidTypeError(
        f"a {type(message).__name__} has no place in a prompt: send system, human, AI, tool or chat messages"
    )


def _text(message: BaseMessage) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    return "".join(_part(part, message) for part in content)


def _part(part: Any, message: BaseMessage) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in _SILENT_PARTS and isinstance(message, AIMessage):
        return ""
    if kind == "json" and isinstance(message, ToolMessage):
        return json.dumps(part.get("json"), ensure_ascii=False)
    raise InvalidTypeError(
        f"a {type(message).__name__} holds a part of type {kind!r}: this model reads text only, "
        "leave images, audio and files out or describe them in words"
    )
