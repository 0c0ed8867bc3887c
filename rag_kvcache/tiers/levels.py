"""Which tier keeps which kind of segment; faults of a tier end here, counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from rag_kvcache.report import TierStats
from rag_kvcache.segment import Level, SegmentKind
from rag_kvcache.tiers.entry import Entry
from rag_kvcache.tiers.tier import NullTier, Tier

T = TypeVar("T")
_log = logging.getLogger(__name__)


def level_of(kind: SegmentKind) -> Level:
    """L1 for static prompts, L3 for the question, L2 for everything else."""
    match kind:
        case SegmentKind.STATIC:
            return Level.STATIC
        case SegmentKind.QUESTION:
            return Level.QUESTION
        case _:
            return Level.DOCUMENT


class Levels:
    """L1 and L2. A failing tier is a miss: counted in ``faults`` by kind, logged, never raised."""

    def __init__(self, static: Tier, document: Tier) -> None:
        self._tiers: dict[Level, Tier] = {
            Level.STATIC: static,
            Level.DOCUMENT: document,
            Level.QUESTION: NullTier(),
        }
        self.faults: Counter[str] = Counter()

    def find(self, kind: SegmentKind, key: bytes) -> Entry | None:
        """The entry for a segment. One that became static since it was stored moves up from L2."""
        entry = self._try("get", lambda: self._tiers[level_of(kind)].get(key), None)
        if entry is None and kind == SegmentKind.STATIC:
            entry = self._try("get", lambda: self._tiers[Level.DOCUMENT].get(key), None)
            if entry is not None:
                self.keep(replace(entry, kind=kind))
        return entry

    def fits(self, kind: SegmentKind, nbytes: int) -> bool:
        """Whether a segment of this kind and size would be kept."""
        return any(self._fits(self._tiers[level], nbytes) for level in _homes(kind))

    def keep(self, entry: Entry) -> bool:
        """Store an entry; a static prompt larger than L1 goes to L2."""
        return any(self._put(self._tiers[level], entry) for level in _homes(entry.kind))

    def knows_text(self, text_digest: bytes) -> bool:
        """Whether this text is cached behind some other prefix."""
        return self._try("get", lambda: self._tiers[Level.DOCUMENT].knows_text(text_digest), False)

    def discard(self, unwanted: Callable[[Entry], bool]) -> int:
        """Drop entries from every tier; returns how many."""
        return sum(self._discard(tier, unwanted) for tier in self._tiers.values())

    def stats(self) -> dict[str, TierStats]:
        """What each level holds."""
        return {str(level): self._tiers[level].stats() for level in (Level.STATIC, Level.DOCUMENT)}

    def _put(self, tier: Tier, entry: Entry) -> bool:
        return self._try("put", lambda: tier.put(entry), False)

    def _fits(self, tier: Tier, nbytes: int) -> bool:
        return self._try("fits", lambda: tier.fits(nbytes), False)

    def _discard(self, tier: Tier, unwanted: Callable[[Entry], bool]) -> int:
        return self._try("discard", lambda: tier.discard(unwanted), 0)

    def _try(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as e:  # whatever a store raises, the answer goes on without it
            self.fault(what, e)
            return otherwise

    def fault(self, what: str, error: Exception) -> None:
        """Count and log a fault of the cache that the answer goes on without."""
        self.faults[what] += 1
        _log.warning("cache failed on %s, going on without it: %s: %s", what, type(error).__name__, error)


def _homes(kind: SegmentKind) -> tuple[Level, ...]:
    level = level_of(kind)
    return (level, Level.DOCUMENT) if level == Level.STATIC else (level,)
