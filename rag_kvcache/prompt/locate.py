"""Finds which known documents stand where in a rendered prompt.

Exact text decides: a document is found when its text stands in the prompt verbatim, stripped of outer
white space, or escaped as Python's ``repr`` or as JSON would (a formatter that prints a list of
documents does that). Leftmost first, the longest of those that start together, no overlaps
(Aho-Corasick, by ahocorasick-rs).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ahocorasick_rs import AhoCorasick, MatchKind

from rag_kvcache.segment import Document


@dataclass(frozen=True)
class Found:
    """``document`` stands at characters [start, stop) of the prompt."""

    start: int
    stop: int
    document: Document


class Locator:
    """Searches texts for a fixed set of documents. Immutable, safe to share between threads."""

    def __init__(self, documents: Iterable[Document]) -> None:
        owners: dict[str, Document] = {}
        for document in documents:
            for spelling in _spellings(document.text):
                owners.setdefault(spelling, document)
        self._owners = list(owners.values())
        self._automaton = AhoCorasick(list(owners), matchkind=MatchKind.LeftmostLongest) if owners else None

    def find(self, text: str) -> tuple[Found, ...]:
        """The documents in ``text``, in order, none overlapping another."""
        if self._automaton is None:
            return ()
        matches = self._automaton.find_matches_as_indexes(text)
        return tuple(Found(start, stop, self._owners[which]) for which, start, stop in matches)


def _spellings(text: str) -> Iterator[str]:
    """The ways a document's text may stand in a prompt; none for a blank text."""
    for base in (text, text.strip()):
        if base.strip():
            yield base
            yield repr(base)[1:-1]
            yield json.dumps(base, ensure_ascii=False)[1:-1]
            yield json.dumps(base)[1:-1]
