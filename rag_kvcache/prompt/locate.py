"""Finds which known documents stand where in a rendered prompt.

Exact text decides: a document is found when its text stands in the prompt verbatim, stripped of outer
white space, or escaped as Python's ``repr`` or as JSON would (a formatter that prints a list of
documents does that). Leftmost first, the longest of those that start together, no overlaps.
Candidates come from an Aho-Corasick automaton (ahocorasick-rs).
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


_ANCHOR = 32  # characters


class Locator:
    """Searches texts for a fixed set of documents. Immutable, safe to share between threads.

    The automaton knows only each spelling's first 32 characters, which tell most documents apart; where
    they match, the rest is compared directly. An automaton of whole documents takes 100 times as long to
    build, and it is built for every request.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        known = [d for d in documents if d.text.strip() and _is_unicode(d.text)]
        owners: dict[str, Document] = {}
        for document in known:  # first: a text that another's escape looks like is itself
            owners.setdefault(document.text, document)
        for document in known:
            for spelling in _spellings(document.text):
                owners.setdefault(spelling, document)
        self._by_anchor: dict[str, list[tuple[str, Document]]] = {}
        for spelling, document in owners.items():
            self._by_anchor.setdefault(spelling[:_ANCHOR], []).append((spelling, document))
        self._anchors = list(self._by_anchor)
        self._automaton = AhoCorasick(self._anchors, matchkind=MatchKind.Standard)

    def find(self, text: str) -> tuple[Found, ...]:
        """The documents in ``text``, in order, none overlapping another."""
        found: list[Found] = []
        for candidate in sorted(self._candidates(text), key=lambda f: (f.start, -f.stop)):
            if not found or candidate.start >= found[-1].stop:
                found.append(candidate)
        return tuple(found)

    def _candidates(self, text: str) -> Iterator[Found]:
        """All places where a spelling of a document stands, overlaps included."""
        for which, start, _ in self._automaton.find_matches_as_indexes(text, overlapping=True):
            for spelling, document in self._by_anchor[self._anchors[which]]:
                if text.startswith(spelling, start):
                    yield Found(start, start + len(spelling), document)


def _spellings(text: str) -> Iterator[str]:
    """The ways a document's text may stand in a prompt."""
    for base in (text, text.strip()):
        yield base
        yield repr(base)[1:-1]
        yield json.dumps(base, ensure_ascii=False)[1:-1]
        yield json.dumps(base)[1:-1]


def _is_unicode(text: str) -> bool:
    """Whether a tokenizer can read it; a lone surrogate would also silence the whole automaton."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
