"""Entries in process memory: least recently used goes first, none outlives its time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from math import inf
from threading import Lock
from typing import Any

from cachetools import Cache, TTLCache

from rag_kvcache.report import TierStats
from rag_kvcache.tiers.entry import Entry


class MemoryTier:
    """Tensors ready for use, bounded by bytes and entries, on cachetools' TTLCache.

    max_bytes: the sum of all entries' KV never exceeds it, not even while one is added.
    ttl_s: seconds an entry lives after it was put; None for ever.
    timer: clock in seconds, injected by tests.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        max_entries: int | None = None,
        ttl_s: float | None = None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = Lock()
        self._max_entries = max_entries or inf
        self._entries = _CountingCache(max_bytes, inf if ttl_s is None else ttl_s, timer)

    def get(self, key: bytes) -> Entry | None:
        """The live entry under ``key``, now the most recently used one; None on a miss."""
        with self._lock:
            return self._entries.get(key)

    def put(self, entry: Entry) -> bool:
        """Keep ``entry``, replacing one of the same key. False when it is larger than the budget."""
        with self._lock:
            if entry.nbytes > self._entries.maxsize:
                return False
            # Out with the old one first: cachetools would make room for the difference only after
            # the new value is there, and a replacement must not carry over the old one's lifetime.
            self._entries.pop(entry.key, None)
            while len(self._entries) >= self._max_entries:
                self._entries.popitem()
            self._entries[entry.key] = entry
            return True

    def discard(self, unwanted: Callable[[Entry], bool]) -> int:
        """Drop all entries that ``unwanted`` says yes to; returns how many."""
        with self._lock, self._entries.timer:  # time stands still: nothing expires between look and delete
            self._entries.expire()
            gone = [key for key, entry in self._entries.untouched() if unwanted(entry)]
            for key in gone:
                del self._entries[key]
            return len(gone)

    def knows_text(self, text_digest: bytes) -> bool:
        """Whether any entry, behind whatever prefix, holds the segment with this text digest."""
        with self._lock:
            self._entries.expire()
            return self._entries.texts[text_digest] > 0

    def fits(self, nbytes: int) -> bool:
        """Whether an entry of this size can be kept at all."""
        return nbytes <= self._entries.maxsize

    def stats(self) -> TierStats:
        """What is held now, and how entries left."""
        with self._lock:
            self._entries.expire()
            return TierStats(
                entries=len(self._entries),
                bytes=int(self._entries.currsize),
                max_bytes=int(self._entries.maxsize),
                evicted=self._entries.evicted,
                expired=self._entries.expired,
            )


class _CountingCache(TTLCache[bytes, Entry]):
    """TTLCache that counts what leaves it, and the texts that are in it."""

    def __init__(self, max_bytes: int, ttl_s: float, timer: Callable[[], float]) -> None:
        super().__init__(max_bytes, ttl_s, timer=timer, getsizeof=lambda entry: entry.nbytes)
        self.texts: Counter[bytes] = Counter()
        self.evicted = 0
        self.expired = 0

    def __setitem__(self, key: bytes, entry: Entry, *args: Any, **kwargs: Any) -> None:
        super().__setitem__(key, entry, *args, **kwargs)
        self.texts[entry.text_digest] += 1

    def __delitem__(self, key: bytes, *args: Any, **kwargs: Any) -> None:
        entry = Cache.__getitem__(self, key)  # not TTLCache's, which would hide one just expiring
        super().__delitem__(key, *args, **kwargs)
        self._forget(entry.text_digest)

    def untouched(self) -> list[tuple[bytes, Entry]]:
        """All that is held; unlike ``items``, which makes what it visits the most recently used."""
        return [(key, Cache.__getitem__(self, key)) for key in self]

    def popitem(self) -> tuple[bytes, Entry]:
        key, entry = super().popitem()
        self.evicted += 1
        return key, entry

    def expire(self, time: Any = None) -> Any:
        gone = super().expire(time)
        for _, entry in gone:
            self._forget(entry.text_digest)
        self.expired += len(gone)
        return gone

    def _forget(self, text: bytes) -> None:
        self.texts[text] -= 1
        if self.texts[text] <= 0:
            del self.texts[text]
