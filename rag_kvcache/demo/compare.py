"""Ask the same questions without and with reuse, and put the reports side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable

Chain = Runnable[str, BaseMessage]


@dataclass(frozen=True)
class Answer:
    """One answer with what its report says. ``ttft_s`` is the time to the first token."""

    text: str
    ttft_s: float
    cached: int
    prefilled: int

    @classmethod
    def of(cls, message: BaseMessage) -> Answer:
        """The answer in a message of ChatRAGKVCache."""
        report: Mapping[str, Any] = message.response_metadata["rag_kvcache"]
        return cls(
            str(message.text),
            report["ttft_s"] or 0.0,
            report["reused_tokens"],
            report["prefilled_tokens"],
        )


@dataclass(frozen=True)
class Row:
    """One question, answered both ways."""

    question: str
    documents: tuple[str, ...]
    off: Answer
    on: Answer

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came with reuse."""
        return self.off.ttft_s / self.on.ttft_s if self.on.ttft_s else 0.0

    @property
    def identical(self) -> bool:
        """Whether both ways gave the same text."""
        return self.off.text == self.on.text

    @property
    def all_cached(self) -> bool:
        """Whether all but the question came from the cache: at least 90% of the prompt."""
        return self.on.cached >= 9 * self.on.prefilled


def compare(
    questions: Iterable[str],
    *,
    off: Chain,
    on: Chain,
    documents: Callable[[str], tuple[str, ...]],
    done: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Ask each question of ``off``, then of ``on``: a machine that slows down then slows both alike.

    ``done`` is called after each answer.
    """

    def ask(chain: Chain, question: str) -> Answer:
        answer = Answer.of(chain.invoke(question))
        done()
        return answer

    return [
        Row(question, documents(question), ask(off, question), ask(on, question)) for question in questions
    ]
