"""Watches tokens come: makes text of them, times the first, says when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event

from rag_kvcache.engine.answer import AnswerText
from rag_kvcache.engine.worker import Emit


class Watch:
    """The receiving end of one generation.

    first: ``time.perf_counter()`` when the first text was handed on, or, if there never was any, the
        first token. None before.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str],
        eos: frozenset[int],
        emit: Emit,
        cancelled: Event,
    ) -> None:
        self.answer = AnswerText(decode, stop)
        self._eos, self._emit, self._cancelled = eos, emit, cancelled
        self._first_text: float | None = None
        self._first_token: float | None = None

    @property
    def first(self) -> float | None:
        """When the user saw the first of the answer."""
        return self._first_token if self._first_text is None else self._first_text

    @property
    def finish_reason(self) -> str:
        """Why the answer ended: "stop", "length" or "cancelled"."""
        ids = self.answer.token_ids
        if self.answer.stopped or (ids and ids[-1] in self._eos):
            return "stop"
        return "cancelled" if self._cancelled.is_set() else "length"

    def on_token(self, token: int) -> bool:
        """Take a token; True when no more is wanted."""
        if self._first_token is None:
            self._first_token = time.perf_counter()
        self._show(self.answer.push(token))
        return self.answer.stopped or self._cancelled.is_set()

    def close(self) -> None:
        """No token follows."""
        self._show(self.answer.close())

    def _show(self, text: str) -> None:
        if text:
            if self._first_text is None:
                self._first_text = time.perf_counter()
            self._emit(text)
