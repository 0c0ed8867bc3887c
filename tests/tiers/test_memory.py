"""The memory tier: the contract, LRU order, lifetimes, and budgets that hold at all times."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_kvcache.tiers import Entry, MemoryTier
from tests.tiers.contract import TOKEN_BYTES, Clock, TickingClock, TierContract, entry, keys

TTL = 10.0


class TestMemoryTier(TierContract):
    def make(self, tokens: int) -> MemoryTier:
        return MemoryTier(tokens * TOKEN_BYTES)


def memory(tokens: int = 100, **kwargs: Any) -> MemoryTier:
    return MemoryTier(tokens * TOKEN_BYTES, **kwargs)


class TestLeastRecentlyUsed:
    def test_the_oldest_goes_first(self) -> None:
        tier = memory(3)
        for name in "abcd":
            tier.put(entry(name))
        assert keys(tier) == ["b", "c", "d"]
        assert tier.stats().evicted == 1

    def test_a_hit_makes_young_again(self) -> None:
        tier = memory(3)
        for name in "abc":
            tier.put(entry(name))
        tier.get(b"a")
        tier.put(entry("d"))
        assert keys(tier) == ["a", "c", "d"]

    def test_storing_again_makes_young_again(self) -> None:
        tier = memory(3)
        for name in "abcad":
            tier.put(entry(name))
        assert keys(tier) == ["a", "c", "d"]

    def test_a_miss_changes_no_order(self) -> None:
        tier = memory(2)
        for name in "ab":
            tier.put(entry(name))
        tier.get(b"x")
        tier.put(entry("c"))
        assert keys(tier) == ["b", "c"]

    @pytest.mark.parametrize(
        "look",
        [
            lambda tier: tier.discard(lambda e: False),
            lambda tier: tier.knows_text(b"a"),
            lambda tier: tier.stats(),
            lambda tier: tier.fits(1),
        ],
        ids=["discard", "knows_text", "stats", "fits"],
    )
    def test_looking_around_is_no_use(self, look: Any) -> None:
        tier = memory(3)
        for name in "abc":
            tier.put(entry(name))
        tier.get(b"a")
        look(tier)
        tier.put(entry("d"))
        assert keys(tier) == ["a", "c", "d"]

    def test_as_many_go_as_are_needed(self) -> None:
        tier = memory(10)
        for name in "abc":
            tier.put(entry(name, 3))
        tier.put(entry("d", 5))
        assert keys(tier) == ["c", "d"]
        assert tier.stats().evicted == 2


class TestReplacement:
    def test_one_key_has_one_entry(self) -> None:
        tier, newer = memory(), entry("a", 5, text="new")
        tier.put(entry("a", 3, text="old"))
        tier.put(newer)
        assert tier.get(b"a") is newer
        assert tier.stats().bytes == 5 * TOKEN_BYTES
        assert tier.stats().entries == 1

    def test_the_old_text_is_forgotten(self) -> None:
        tier = memory()
        tier.put(entry("a", text="old"))
        tier.put(entry("a", text="new"))
        assert not tier.knows_text(b"old")
        assert tier.knows_text(b"new")

    def test_does_not_evict_for_the_room_it_frees_itself(self) -> None:
        tier = memory(10)
        tier.put(entry("a", 5))
        tier.put(entry("b", 5))
        tier.put(entry("a", 5))
        assert keys(tier) == ["a", "b"]
        assert tier.stats().evicted == 0

    def test_one_too_large_leaves_the_old_one(self) -> None:
        tier = memory(10)
        tier.put(entry("a", 5))
        assert tier.put(entry("a", 11)) is False
        got = tier.get(b"a")
        assert got is not None
        assert got.tokens == 5


class TestLifetime:
    def test_ends_after_the_ttl(self) -> None:
        clock = Clock()
        tier = memory(ttl_s=TTL, timer=clock)
        tier.put(entry("a"))
        clock.now = TTL - 0.01
        assert tier.get(b"a") is not None
        clock.now = TTL
        assert tier.get(b"a") is None
        assert not tier.knows_text(b"a")
        stats = tier.stats()
        assert (stats.entries, stats.bytes, stats.expired, stats.evicted) == (0, 0, 1, 0)

    def test_is_not_prolonged_by_use(self) -> None:
        clock = Clock()
        tier = memory(ttl_s=TTL, timer=clock)
        tier.put(entry("a"))
        for clock.now in (3.0, 6.0, 9.0):
            assert tier.get(b"a") is not None
        clock.now = TTL
        assert tier.get(b"a") is None

    def test_begins_anew_with_a_replacement(self) -> None:
        clock = Clock()
        tier = memory(ttl_s=TTL, timer=clock)
        tier.put(entry("a"))
        clock.now = 9.0
        tier.put(entry("a"))
        clock.now = 18.0
        assert tier.get(b"a") is not None
        clock.now = 19.0
        assert tier.get(b"a") is None

    def test_without_a_ttl_is_for_ever(self) -> None:
        clock = Clock()
        tier = memory(timer=clock)
        tier.put(entry("a"))
        clock.now = 1e12
        assert tier.get(b"a") is not None

    def test_the_expired_make_room_before_the_living(self) -> None:
        clock = Clock()
        tier = memory(10, ttl_s=TTL, timer=clock)
        tier.put(entry("old", 5))
        clock.now = 5.0
        tier.put(entry("young", 5))
        tier.get(b"old")  # now the most recently used one
        clock.now = TTL
        tier.put(entry("new", 5))
        assert keys(tier) == ["new", "young"]
        assert (tier.stats().evicted, tier.stats().expired) == (0, 1)

    def test_may_end_while_a_discard_looks(self) -> None:
        clock = Clock()
        tier = memory(ttl_s=TTL, timer=clock)
        tier.put(entry("a"))
        tier.put(entry("b"))

        def slow(_: Entry) -> bool:
            clock.now = TTL
            return True

        assert tier.discard(slow) == 2
        assert not tier.knows_text(b"a")
        assert tier.stats().entries == 0

    def test_may_end_in_the_middle_of_any_call(self) -> None:
        tier = memory(10, ttl_s=TTL, timer=TickingClock(0.3))
        for n in range(200):
            name = f"{n % 7}"
            tier.put(entry(name, 1 + n % 4))
            tier.get(f"{n * 3 % 7}".encode())
            tier.knows_text(name.encode())
            assert tier.stats().bytes <= 10 * TOKEN_BYTES
        tier.discard(lambda e: True)
        assert not any(tier.knows_text(f"{n}".encode()) for n in range(7))


class TestMaxEntries:
    def test_bounds_the_number(self) -> None:
        tier = memory(max_entries=2)
        for name in "abc":
            tier.put(entry(name))
        assert keys(tier) == ["b", "c"]
        assert tier.stats().evicted == 1

    def test_a_replacement_evicts_nobody(self) -> None:
        tier = memory(max_entries=2)
        for name in "abb":
            tier.put(entry(name))
        assert keys(tier) == ["a", "b"]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 12)),
        st.tuples(st.just("get"), st.integers(0, 5)),
        st.tuples(st.just("discard"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.floats(0, TTL, allow_nan=False)),
    ),
    max_size=40,
)


def has_key(name: str, e: Entry) -> bool:
    return e.key == name.encode()


class Model:
    """A memory tier as one would write it without caring for speed."""

    def __init__(self, max_bytes: int, max_entries: int, clock: Clock) -> None:
        self.max_bytes, self.max_entries, self.clock = max_bytes, max_entries, clock
        self.held: OrderedDict[str, tuple[int, float]] = OrderedDict()

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.held.values())

    def expire(self) -> None:
        for name in [n for n, (_, ends) in self.held.items() if ends <= self.clock()]:
            del self.held[name]

    def put(self, name: str, size: int) -> bool:
        self.expire()
        if size > self.max_bytes:
            return False
        self.held.pop(name, None)
        while self.held and (self.bytes + size > self.max_bytes or len(self.held) >= self.max_entries):
            self.held.popitem(last=False)
        self.held[name] = (size, self.clock() + TTL)
        return True

    def get(self, name: str) -> bool:
        self.expire()
        if name in self.held:
            self.held.move_to_end(name)
        return name in self.held


@settings(max_examples=150, deadline=None)
@given(operations)
def test_behaves_as_the_model_after_any_sequence(steps: list[tuple[Any, ...]]) -> None:
    clock = Clock()
    tier = memory(10, max_entries=4, ttl_s=TTL, timer=clock)
    model = Model(10 * TOKEN_BYTES, 4, clock)
    for what, *arguments in steps:
        match what, arguments:
            case "put", [which, tokens]:
                # two keys share each text
                stored = tier.put(entry(f"k{which}", tokens, text=f"t{which // 2}"))
                assert stored is model.put(f"k{which}", tokens * TOKEN_BYTES)
            case "get", [which]:
                assert (tier.get(f"k{which}".encode()) is not None) is model.get(f"k{which}")
            case "discard", [which]:
                model.expire()
                dropped = model.held.pop(f"k{which}", None) is not None
                assert tier.discard(partial(has_key, f"k{which}")) == dropped
            case "wait", [seconds]:
                clock.now += seconds
        model.expire()
        stats = tier.stats()
        assert stats.bytes == model.bytes <= stats.max_bytes
        assert stats.entries == len(model.held) <= 4
        known = {n for n in range(3) if tier.knows_text(f"t{n}".encode())}
        assert known == {int(name[1:]) // 2 for name in model.held}
    assert keys(tier) == sorted(model.held)
