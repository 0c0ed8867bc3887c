"""Turns generated ids into text, piece by piece, and stops at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "�"  # what a tokenizer prints for a character whose bytes are not all there yet


class AnswerText:
    """The growing text of one answer.

    ``push`` returns what may be shown: no half characters, nothing that might yet turn out to be the
    beginning of a stop string. The joined pieces are the answer's text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded along, as a token's text depends on its left side
        self._read = 0  # ids before here are in the text
        self._held = ""
        self._pieces: list[str] = []
        self.stopped = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids pushed."""
        return tuple(self._ids)

    @property
    def text(self) -> str:
        """What was shown so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Add a token; returns new text to show, often one word, sometimes nothing."""
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._read])
        now = self._decode(self._ids[self._context :])
        if len(now) <= len(before) or now.endswith(_INCOMPLETE):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return self._show(now[len(before) :])

    def close(self) -> str:
        """No token follows: returns what was held back."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._context : self._read])
        shown = self._show(self._decode(self._ids[self._context :])[len(before) :])
        if self._held and not self.stopped:
            self._pieces.append(self._held)
            shown, self._held = shown + self._held, ""
        return shown

    def _show(self, new: str) -> str:
        held = self._held + new
        cuts = [at for s in self._stop if (at := held.find(s)) >= 0]
        if cuts:
            self.stopped = True
            shown, self._held = held[: min(cuts)], ""
        else:
            keep = _maybe_stop(held, self._stop)
            shown, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self._pieces.append(shown)
        return shown


def _maybe_stop(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string."""
    longest = max((len(s) for s in stop), default=1) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0
    )
