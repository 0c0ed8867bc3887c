"""A chain's prompt template, rendered with a slot where the documents will stand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder

from rag_kvcache.errors import InvalidTypeError, RequestError

_log = logging.getLogger(__name__)


def slot_of(variable: str) -> str:
    """What stands for the documents in a rendered template."""
    return "{" + variable + "}"


def with_slot(prompt: Any, variable: str, values: Mapping[str, Any]) -> PromptValue:
    """The prompt with ``slot_of(variable)`` where the documents will stand.

    prompt: a prompt template, or text or messages that hold the slot already.
    values: variables whose value is the same in every request. Others are left as ``{name}``; message
        placeholders are left out.
    """
    slot = slot_of(variable)
    if isinstance(prompt, BasePromptTemplate):
        rendered = _render(prompt, variable, values)
    elif isinstance(prompt, PromptValue):
        rendered = prompt
    elif isinstance(prompt, str):
        rendered = StringPromptValue(text=prompt)
    elif isinstance(prompt, list | tuple):
        rendered = ChatPromptValue(messages=ChatPromptTemplate.from_messages(prompt).format_messages())
    else:
        raise InvalidTypeError(f"prompt must be a template, text or messages, not {type(prompt).__name__}")
    if slot not in rendered.to_string():
        raise RequestError(
            f"the prompt has no {slot}: name the variable that holds the documents, variable='...'"
        )
    return rendered


def _render(prompt: BasePromptTemplate[Any], variable: str, values: Mapping[str, Any]) -> PromptValue:
    if variable not in prompt.input_variables:
        raise RequestError(
            f"the prompt template has no variable {variable!r}, its variables are "
            f"{', '.join(sorted(prompt.input_variables)) or 'none'}: name the one that holds the documents"
        )
    lists = _message_variables(prompt)
    open_ones = [name for name in prompt.input_variables if name != variable and name not in values]
    filled = {name: [] if name in lists else slot_of(name) for name in (variable, *open_ones)}
    rendered = prompt.format_prompt(**{**filled, **values})
    before = rendered.to_string().partition(slot_of(variable))[0]
    unknown = [name for name in open_ones if slot_of(name) in before]
    if unknown:
        _log.warning(
            "%s stands before the documents in the prompt: what is warmed is reused only if its value is "
            "always the same. Give the value to warm(), or move it behind the documents",
            ", ".join(map(slot_of, unknown)),
        )
    return rendered


def _message_variables(prompt: BasePromptTemplate[Any]) -> set[str]:
    if not isinstance(prompt, ChatPromptTemplate):
        return set()
    return {part.variable_name for part in prompt.messages if isinstance(part, MessagesPlaceholder)}
