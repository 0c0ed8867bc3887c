"""The seam between the engine and whatever keeps entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rag_kvcache.report import TierStats
from rag_kvcache.tiers.entry import Entry


class Tier(Protocol):
    """Keeps entries by key. Safe to call from many threads."""

    def get(self, key: bytes) -> Entry | None:
        """The live entry under ``key``, now the most recently used one; None on a miss."""

    def put(self, entry: Entry) -> bool:
        """Keep ``entry``, replacing one of the same key. False when it is larger than the budget."""

    def discard(self, unwanted: Callable[[Entry], bool]) -> int:
        """Drop all entries that ``unwanted`` says yes to; returns how many."""

    def knows_text(self, text_digest: bytes) -> bool:
        """Whether any entry, behind whatever prefix, holds the segment with this text digest."""

    def fits(self, nbytes: int) -> bool:
        """Whether an entry of this size can be kept at all."""

    def stats(self) -> TierStats:
        """What is held now, and how entries left."""


class NullTier:
    """A tier that keeps nothing: a level that is switched off."""

    def get(self, key: bytes) -> Entry | None:
        """Always a miss."""
        return None

    def put(self, entry: Entry) -> bool:
        """Keeps nothing."""
        return False

    def discard(self, unwanted: Callable[[Entry], bool]) -> int:
        """Nothing to drop."""
        return 0

    def knows_text(self, text_digest: bytes) -> bool:
        """Knows nothing."""
        return False

    def fits(self, nbytes: int) -> bool:
        """Nothing fits."""
        return False

    def stats(self) -> TierStats:
        """All zero."""
        return TierStats(entries=0, bytes=0, max_bytes=0, evicted=0, expired=0)
