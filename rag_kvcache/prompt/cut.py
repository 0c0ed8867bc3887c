"""Cuts a tokenised prompt into segments.

A token belongs to a document when all its characters do. One that straddles a document's edge is glue,
so the ids are those of the whole prompt, whatever the neighbours did to the edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rag_kvcache.keys import text_digest, tokens_digest
from rag_kvcache.model.tokenizer import Encoded
from rag_kvcache.prompt.locate import Found
from rag_kvcache.prompt.render import Rendered
from rag_kvcache.segment import Document, Segment, SegmentKind


@dataclass(frozen=True)
class Layout:
    """Landmarks of a prompt in tokens.

    documents: (start, stop, document) per located document with at least one token of its own, in order.
    head: tokens that might be static: all before the first document, the history or the question.
    opening: where the chat template's own beginning and the system messages end; 0 for plain text.
    turn: where the current turn begins; what stands between is history.
    question: where the question begins, ``tokens`` when it is unknown.
    """

    tokens: int
    head: int
    opening: int
    turn: int
    question: int
    documents: tuple[tuple[int, int, Document], ...]

    @property
    def tail(self) -> int:
        """Where the last document ends, or the head when there is none."""
        return self.documents[-1][1] if self.documents else self.head


def lay_out(rendered: Rendered, encoded: Encoded, found: Sequence[Found], question: str | None) -> Layout:
    """Map characters to tokens. Without offsets nothing is known of the structure."""
    n = len(encoded.ids)
    if encoded.starts is None or encoded.ends is None:
        return Layout(n, head=0, opening=0, turn=0, question=n, documents=())
    starts, ends = encoded.starts, encoded.ends

    def before(char: int) -> int:
        """How many leading tokens stand wholly before a character."""
        over = np.flatnonzero(ends > char)
        return int(over[0]) if len(over) else n

    documents = []
    for f in found:
        inside = np.flatnonzero((starts >= f.start) & (ends <= f.stop) & (ends > starts))
        if len(inside):
            documents.append((int(inside[0]), int(inside[-1]) + 1, f.document))
    at = _question_at(rendered, found, question)
    asked = n if at is None else before(at)
    first = before(found[0].start) if documents else n
    if rendered.static_stop is None:
        head = first if documents else (asked if at is not None else 0)
    elif rendered.has_history or not documents:
        head = min(first, before(rendered.static_stop))
    else:
        head = first
    opening = before(rendered.static_stop or 0)
    return Layout(n, min(head, asked), opening, before(rendered.turn_start), asked, tuple(documents))


def _question_at(rendered: Rendered, found: Sequence[Found], question: str | None) -> int | None:
    """The character where the question begins: its last occurrence outside the documents."""
    if not question or not question.strip():
        return None
    asked, at = question.strip(), len(rendered.text)
    while (at := rendered.text.rfind(asked, 0, at)) >= 0:
        if not any(f.start <= at < f.stop for f in found):
            return at
        at += len(asked) - 1
    return None


def cut(encoded: Encoded, layout: Layout, static: Sequence[int], block: int) -> tuple[Segment, ...]:
    """The segments of a prompt, in order and without gaps; ``static``: lengths of its static beginnings.

    History, and a turn in which no document was found, are cut into blocks of ``block`` tokens. In such a
    turn, unless the question is known, the last ``block`` tokens are taken for it: a question is never
    stored.
    """
    pieces = _Pieces(encoded, block)
    for length in static:
        pieces.add(SegmentKind.STATIC, min(length, layout.tokens))
    for start, stop, document in layout.documents:
        if start < pieces.at:  # inside the static prompt
            continue
        if layout.turn > layout.opening:  # the opening may become static without what is behind it
            pieces.add(SegmentKind.GLUE, min(layout.opening, start))
            pieces.add_blocks(SegmentKind.HISTORY, min(layout.turn, start))
        pieces.add(SegmentKind.GLUE, min(layout.question, start))
        pieces.add(SegmentKind.QUESTION, start)
        pieces.add_document(stop, document)
    pieces.add(SegmentKind.GLUE, layout.opening)
    pieces.add_blocks(SegmentKind.HISTORY, layout.turn)
    if not layout.documents or layout.documents[-1][1] <= layout.turn:
        known = layout.question < layout.tokens
        pieces.add_blocks(SegmentKind.BLOCK, layout.question if known else layout.tokens - block)
    pieces.add(SegmentKind.QUESTION, layout.tokens)
    return tuple(pieces.segments)


class _Pieces:
    """Segments collected from left to right; each ``add`` goes on from where the last one stopped."""

    def __init__(self, encoded: Encoded, block: int) -> None:
        self._ids, self._block = encoded.ids, block
        self.at = 0
        self.segments: list[Segment] = []

    def add(self, kind: SegmentKind, stop: int) -> None:
        if stop > self.at:
            self._append(kind, stop, tokens_digest(self._ids[self.at : stop]), None)

    def add_document(self, stop: int, document: Document) -> None:
        self._append(SegmentKind.DOCUMENT, stop, text_digest(document.text), document)

    def add_blocks(self, kind: SegmentKind, stop: int) -> None:
        """Blocks end at multiples of their size, so that a longer history begins with the same ones."""
        while self.at < stop:
            self.add(kind, min(stop, (self.at // self._block + 1) * self._block))

    def _append(self, kind: SegmentKind, stop: int, digest: bytes, document: Document | None) -> None:
        self.segments.append(Segment(kind, self.at, stop, digest, document))
        self.at = stop
