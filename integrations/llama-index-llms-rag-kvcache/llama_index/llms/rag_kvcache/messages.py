"""Chat messages in the form that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    VideoBlock,
)

from rag_kvcache.errors import InvalidTypeError

if TYPE_CHECKING:
    from rag_kvcache.engine import Engine

_NOT_TEXT = (ImageBlock, AudioBlock, VideoBlock, DocumentBlock)


def as_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Role and text of each message. Text blocks are joined as LlamaIndex joins them, by a newline."""
    result = []
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise InvalidTypeError(f"messages must be ChatMessages, not {type(message).__name__}")
        for block in message.blocks:
            if isinstance(block, _NOT_TEXT):
                raise InvalidTypeError(
                    f"this LLM reads text only, but a message holds a {type(block).__name__}"
                )
        result.append({"role": message.role.value, "content": message.content or ""})
    return result


def as_text(prompt: str | Sequence[dict[str, Any]]) -> str:
    """All text of a prompt, to look for documents in."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


class ChatTemplateText:
    """Messages as one text. The default ``messages_to_prompt``: LlamaIndex calls it to send a chat prompt
    to ``complete``; ``chat`` hands the messages themselves to the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """The chat template's text, or LlamaIndex's own layout where the tokenizer has no template."""
        if not self._engine.has_chat_template:
            return generic_messages_to_prompt(messages)
        tokenizer: Any = self._engine.tokenizer
        text: str = tokenizer.apply_chat_template(
            as_dicts(messages), tokenize=False, add_generation_prompt=True
        )
        # The tokenizer will put a BOS before the text; the template has put one there already.
        bos = tokenizer.bos_token
        return text.removeprefix(bos) if bos and tokenizer.num_special_tokens_to_add() else text
