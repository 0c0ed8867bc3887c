"""What every tier must do. A tier's test class inherits ``TierContract`` and says how to make one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import torch

from rag_kvcache.segment import SegmentKind
from rag_kvcache.tiers import DocumentRef, Entry, Tier

TOKEN_BYTES = 4
"""KV of one token in these tests: one plane [1, 1, tokens, 1] of float32."""


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TickingClock(Clock):
    """A clock that moves every time somebody looks at it."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def entry(
    name: str,
    tokens: int = 1,
    *,
    text: str | None = None,
    kind: SegmentKind = SegmentKind.DOCUMENT,
    fingerprint: bytes = b"fingerprint",
    prefix: bytes = b"prefix",
    start: int = 0,
) -> Entry:
    """An entry of ``tokens`` tokens 0, 1, 2, ... whose text has its own name unless said otherwise."""
    digest = (name if text is None else text).encode()
    return Entry(
        key=name.encode(),
        fingerprint=fingerprint,
        tenant="default",
        prefix_digest=prefix,
        text_digest=digest,
        kind=kind,
        start=start,
        token_ids=np.arange(tokens, dtype=np.int64),
        planes=(torch.zeros(1, 1, tokens, 1),),
        documents=(DocumentRef(digest, name),),
    )


def held(tier: Tier) -> list[Entry]:
    """All entries of a tier, none of them touched."""
    found: list[Entry] = []
    tier.discard(lambda e: found.append(e) is not None)  # append gives None: nothing is dropped
    return found


def keys(tier: Tier) -> list[str]:
    """Names of all entries of a tier, sorted."""
    return sorted(e.key.decode() for e in held(tier))


class TierContract:
    """The contract. ``make`` gives an empty tier for so many tokens; ``keeps`` says whether it keeps any."""

    keeps = True

    def make(self, tokens: int) -> Tier:
        raise NotImplementedError

    @pytest.fixture
    def tier(self) -> Tier:
        return self.make(tokens=10)

    def test_a_miss_is_none(self, tier: Tier) -> None:
        assert tier.get(b"nothing") is None

    def test_an_entry_comes_back_as_it_was(self, tier: Tier) -> None:
        a = entry("a", 3)
        assert tier.put(a) is self.keeps
        got = tier.get(b"a")
        assert (got is not None) is self.keeps
        if got is not None:
            assert (got.fingerprint, got.prefix_digest, got.start) == (a.fingerprint, a.prefix_digest, 0)
            assert got.token_ids.tolist() == [0, 1, 2]
            assert torch.equal(got.planes[0], a.planes[0])
            assert got.documents == a.documents

    def test_what_fits_says_is_what_put_does(self, tier: Tier) -> None:
        for tokens in (0, 1, 10, 11, 1000):
            assert tier.fits(tokens * TOKEN_BYTES) is tier.put(entry(f"n{tokens}", tokens))

    def test_too_large_is_refused_and_loses_nothing(self, tier: Tier) -> None:
        kept = tier.put(entry("a", 4))
        assert tier.put(entry("huge", 11)) is False
        assert tier.get(b"huge") is None
        assert (tier.get(b"a") is not None) is kept
        assert tier.stats().evicted == 0

    def test_discard_drops_what_is_unwanted_and_counts_it(self, tier: Tier) -> None:
        for name in ("a1", "a2", "b1"):
            tier.put(entry(name))
        assert tier.discard(lambda e: e.key.startswith(b"a")) == (2 if self.keeps else 0)
        assert tier.get(b"a1") is None
        assert keys(tier) == (["b1"] if self.keeps else [])
        assert tier.discard(lambda e: True) == (1 if self.keeps else 0)
        assert tier.stats().entries == tier.stats().bytes == 0

    def test_knows_the_texts_it_holds(self, tier: Tier) -> None:
        assert not tier.knows_text(b"T")
        tier.put(entry("behind one prefix", text="T"))
        tier.put(entry("behind another", text="T"))
        assert tier.knows_text(b"T") is self.keeps
        tier.discard(lambda e: e.key == b"behind another")
        assert tier.knows_text(b"T") is self.keeps
        tier.discard(lambda e: True)
        assert not tier.knows_text(b"T")

    def test_stats_say_what_is_held(self, tier: Tier) -> None:
        tier.put(entry("a", 3))
        tier.put(entry("b", 4))
        stats = tier.stats()
        assert (stats.entries, stats.bytes) == ((2, 7 * TOKEN_BYTES) if self.keeps else (0, 0))
        assert stats.max_bytes == (10 * TOKEN_BYTES if self.keeps else 0)
        assert (stats.evicted, stats.expired) == (0, 0)

    def test_many_threads_at_once(self) -> None:
        tier, ticket, budget = self.make(tokens=20), count(), 20 * TOKEN_BYTES

        def work(seed: int) -> None:
            for n in range(100):
                which = (seed * 7 + n * 3) % 12
                if n % 10 == 9:
                    tier.discard(lambda e: e.key == b"3")
                elif n % 3:
                    tier.put(entry(str(which), 1 + which % 5))
                else:
                    got = tier.get(str(which).encode())
                    assert got is None or (got.key, got.tokens) == (str(which).encode(), 1 + which % 5)
                assert tier.stats().bytes <= budget
                next(ticket)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert next(ticket) == 800
        assert tier.stats().bytes == sum(e.nbytes for e in held(tier))
        assert tier.stats().entries == len(held(tier))
