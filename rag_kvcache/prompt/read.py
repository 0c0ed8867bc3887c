"""Reads a prompt: render, locate documents, tokenise, find the landmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_kvcache.errors import EmptyPromptError, RequestError
from rag_kvcache.keys import TokenIds
from rag_kvcache.model.tokenizer import Encoded, PromptTokenizer
from rag_kvcache.prompt.cut import Layout, cut, lay_out
from rag_kvcache.prompt.locate import Locator
from rag_kvcache.prompt.render import encode, render
from rag_kvcache.segment import Segment


@dataclass(frozen=True)
class ReadPrompt:
    """A tokenised prompt and its landmarks. block: tokens per block where no structure is known."""

    encoded: Encoded
    layout: Layout
    block: int

    @property
    def ids(self) -> TokenIds:
        """The prompt's token ids, [tokens]."""
        return self.encoded.ids

    @property
    def has_offsets(self) -> bool:
        """Whether it is known where each token stands in the text."""
        return self.encoded.starts is not None

    def segments(self, static: Sequence[int] = ()) -> tuple[Segment, ...]:
        """The prompt cut into segments; ``static``: the lengths of its static beginnings, ascending."""
        return cut(self.encoded, self.layout, static, self.block)


def read(
    prompt: str | Sequence[Mapping[str, Any]],
    locator: Locator,
    question: str | None,
    tokenizer: PromptTokenizer,
    block: int,
) -> ReadPrompt:
    """Raises EmptyPromptError when no token comes out, ChatTemplateError when messages are refused.

    Raises RequestError for a prompt with lone surrogates, which no tokenizer can read.
    """
    rendered = render(prompt, tokenizer)
    try:
        rendered.text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(f"the prompt is no valid Unicode text: {e}") from None
    found = locator.find(rendered.text)
    encoded = encode(rendered, found, tokenizer)
    if len(encoded.ids) == 0:
        raise EmptyPromptError("the prompt has no tokens")
    return ReadPrompt(encoded, lay_out(rendered, encoded, found, question), block)
