"""Learns which beginning of the prompts stays the same between questions (level L1)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from rag_kvcache.keys import TokenIds, common_prefix

T = TypeVar("T")
_MIN_COMMON = 8  # tokens; shorter coincidences are no template


@dataclass(frozen=True)
class StaticPrefix:
    """The beginnings of a prompt known to be static.

    cuts: their lengths in tokens, ascending; the last is the longest. ``retired``: beginnings that turned
        out not to be static.
    """

    cuts: tuple[int, ...]
    retired: tuple[TokenIds, ...] = ()


class StaticPrefixes:
    """What is known of one tenant's static prompts. Bounded, thread-safe.

    A beginning is static when the user named it (``warm``), or when the same head (all that stands before
    the first document) came with two different tails. Where heads never repeat, because a question, a date
    or a history stands in them, what they all have in common is static: that can only shrink, so a thousand
    histories leave one static prefix, not a thousand.
    """

    def __init__(self, *, max_heads: int = 64, max_common: int = 8, max_named: int = 256) -> None:
        self._lock = Lock()
        self._max_heads, self._max_common, self._max_named = max_heads, max_common, max_named
        self._named: OrderedDict[bytes, TokenIds] = OrderedDict()
        self._heads: OrderedDict[bytes, _Head] = OrderedDict()
        self._common: list[TokenIds] = []

    def name(self, ids: TokenIds) -> None:
        """The user says these tokens begin all prompts of a kind."""
        with self._lock:
            _remember(self._named, ids.tobytes(), ids.copy(), self._max_named)

    def observe(self, ids: TokenIds, head: int, tail: bytes) -> StaticPrefix:
        """Learn from a prompt: ``head`` tokens that might be static, the rest with digest ``tail``."""
        with self._lock:
            named = {len(n) for n in self._named.values() if common_prefix(n, ids) == len(n)}
            learned, retired = self._learn(ids[:head], tail)
            return StaticPrefix(tuple(sorted((named | learned) - {0})), retired)

    def _learn(self, head: TokenIds, tail: bytes) -> tuple[set[int], tuple[TokenIds, ...]]:
        if len(head) == 0:
            return set(), ()
        name = head.tobytes()
        known = self._heads.get(name)
        if known is not None:
            self._heads.move_to_end(name)
            known.proven = known.proven or known.tail != tail
            if known.proven:
                shared = {len(c) for c in self._common if common_prefix(c, head) == len(c)}
                return shared | {len(head)}, ()
        others = [h.ids for n, h in self._heads.items() if n != name]
        _remember(self._heads, name, known or _Head(head, tail), self._max_heads)
        common, retired = self._shared(head, others)
        return {common}, retired

    def _shared(self, head: TokenIds, others: list[TokenIds]) -> tuple[int, tuple[TokenIds, ...]]:
        """The beginning that ``head`` shares with the others, kept as short as any of them demands."""
        for i, common in enumerate(self._common):
            shared = common_prefix(common, head)
            if shared == len(common):
                return shared, ()
            if shared >= _MIN_COMMON:
                self._common[i] = head[:shared].copy()
                return shared, (common,)
        best = max((common_prefix(other, head) for other in others), default=0)
        if best < _MIN_COMMON:
            return 0, ()
        self._common = [*self._common[-self._max_common + 1 :], head[:best].copy()]
        return best, ()


class _Head:
    """A head seen before: proven static once it came with a second tail."""

    def __init__(self, ids: TokenIds, tail: bytes) -> None:
        self.ids, self.tail, self.proven = ids.copy(), tail, False


def _remember(into: OrderedDict[bytes, T], name: bytes, value: T, limit: int) -> None:
    into[name] = value
    into.move_to_end(name)
    while len(into) > limit:
        into.popitem(last=False)
