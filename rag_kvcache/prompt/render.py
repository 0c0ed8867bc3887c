"""From text or chat messages to the one text the model sees, with its landmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_kvcache.errors import ChatTemplateError
from rag_kvcache.model.tokenizer import Encoded, Message, PromptTokenizer
from rag_kvcache.prompt.locate import Found

# Stands for "some other text" when the template is rendered to see where a message begins. A private
# use character: no message begins with it.
_PROBE = "\ue000"


@dataclass(frozen=True)
class Rendered:
    """The prompt as text.

    static_stop: where the chat template and the system messages end, characters; None for plain text.
    turn_start: where the current turn (the last user message and what follows) begins; 0 for plain text.
    messages: the chat messages, None for plain text.
    """

    text: str
    static_stop: int | None
    turn_start: int
    messages: tuple[Message, ...] | None

    @property
    def has_history(self) -> bool:
        """Whether earlier turns stand between the system messages and the current turn."""
        return self.static_stop is not None and self.turn_start > self.static_stop


def render(prompt: str | Sequence[Message], tokenizer: PromptTokenizer) -> Rendered:
    """Apply the chat template to messages; text is taken as it is.

    The landmarks are found by rendering beginnings of the conversation and comparing text, never by
    counting the messages' characters: a template may trim or rewrite them.
    """
    if isinstance(prompt, str):
        return Rendered(prompt, None, 0, None)
    text = tokenizer.render(prompt)
    system = 0
    while system < len(prompt) and prompt[system].get("role") in ("system", "developer"):
        system += 1
    last_user = max((i for i, m in enumerate(prompt) if m.get("role") == "user"), default=0)
    static_stop = _begin_of(prompt[:system], text, tokenizer)
    turn_start = static_stop if last_user <= system else _begin_of(prompt[:last_user], text, tokenizer)
    return Rendered(text, static_stop, max(static_stop, turn_start), tuple(prompt))


def _begin_of(before: Sequence[Message], text: str, tokenizer: PromptTokenizer) -> int:
    """Where in ``text`` the user message behind ``before`` begins; 0 when the template does not tell."""
    try:
        other = tokenizer.render([*before, {"role": "user", "content": _PROBE}], generation_prompt=False)
    except ChatTemplateError:
        return 0
    return _shared(other, text)


def encode(rendered: Rendered, found: Sequence[Found], tokenizer: PromptTokenizer) -> Encoded:
    """Tokenise the whole prompt at once, so that the ids equal those of an uncached run.

    Control tokens spelled inside messages or documents are encoded as plain text; the ids then come
    without offsets.
    """
    if rendered.messages is not None:
        if any(any(tokenizer.control_spellings(s)) for s in _strings(rendered.messages)):
            return tokenizer.encode_sanitized(rendered.messages)
        return tokenizer.encode(rendered.text, special=False)
    # Also those of which a document is only a part: two documents side by side could spell one together.
    spans = [
        (start, stop)
        for start, stop in tokenizer.control_spellings(rendered.text)
        if any(f.start < stop and start < f.stop for f in found)
    ]
    if spans:
        return tokenizer.encode_guarded(rendered.text, spans)
    return tokenizer.encode(rendered.text, special=True)


def _strings(value: Any) -> Iterator[str]:
    """Every string in a message, also inside tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _shared(a: str, b: str) -> int:
    """Number of leading characters that two texts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
