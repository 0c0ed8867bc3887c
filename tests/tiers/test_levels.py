"""Levels: who keeps what, and faults of a tier that end there."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from rag_kvcache.segment import Level, SegmentKind
from rag_kvcache.tiers import Entry, Levels, MemoryTier, NullTier, level_of
from tests.tiers.contract import TOKEN_BYTES, entry, keys


class BrokenTier(MemoryTier):
    """Raises whatever it is asked, as a lost connection would make it."""

    def __init__(self) -> None:
        super().__init__(100 * TOKEN_BYTES)

    def _broken(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConnectionError("the store is gone")

    get = put = discard = knows_text = fits = _broken


def static(name: str, tokens: int = 1) -> Entry:
    return entry(name, tokens, kind=SegmentKind.STATIC)


@pytest.fixture
def l1() -> MemoryTier:
    return MemoryTier(5 * TOKEN_BYTES)


@pytest.fixture
def l2() -> MemoryTier:
    return MemoryTier(20 * TOKEN_BYTES)


@pytest.fixture
def levels(l1: MemoryTier, l2: MemoryTier) -> Levels:
    return Levels(static=l1, document=l2)


@pytest.mark.parametrize("kind", SegmentKind)
def test_every_kind_has_its_level(kind: SegmentKind) -> None:
    expected = {SegmentKind.STATIC: Level.STATIC, SegmentKind.QUESTION: Level.QUESTION}
    assert level_of(kind) == expected.get(kind, Level.DOCUMENT)


class TestKeeping:
    def test_static_prompts_and_documents_live_apart(
        self, levels: Levels, l1: MemoryTier, l2: MemoryTier
    ) -> None:
        assert levels.keep(static("s"))
        assert levels.keep(entry("d"))
        assert (keys(l1), keys(l2)) == (["s"], ["d"])

    def test_documents_never_push_out_static_prompts(self, levels: Levels, l1: MemoryTier) -> None:
        levels.keep(static("s", 5))
        for n in range(50):
            levels.keep(entry(f"d{n}", 10))
        assert keys(l1) == ["s"]

    def test_a_static_prompt_larger_than_l1_goes_to_l2(
        self, levels: Levels, l1: MemoryTier, l2: MemoryTier
    ) -> None:
        assert levels.fits(SegmentKind.STATIC, 6 * TOKEN_BYTES)
        assert levels.keep(static("large", 6))
        assert (keys(l1), keys(l2)) == ([], ["large"])
        assert levels.find(SegmentKind.STATIC, b"large") is not None
        assert keys(l1) == []

    def test_one_larger_than_both_is_refused(self, levels: Levels) -> None:
        assert not levels.fits(SegmentKind.STATIC, 21 * TOKEN_BYTES)
        assert not levels.keep(static("huge", 21))

    def test_a_question_is_never_kept(self, levels: Levels) -> None:
        question = entry("q", kind=SegmentKind.QUESTION)
        assert not levels.fits(SegmentKind.QUESTION, 0)
        assert not levels.keep(question)
        assert levels.find(SegmentKind.QUESTION, b"q") is None

    def test_a_level_that_is_off_keeps_nothing(self, l1: MemoryTier) -> None:
        levels = Levels(static=l1, document=NullTier())
        assert levels.keep(static("s"))
        assert not levels.keep(entry("d"))
        assert not levels.fits(SegmentKind.DOCUMENT, 0)
        assert levels.fits(SegmentKind.STATIC, 0)


class TestFinding:
    def test_a_document_is_not_looked_for_in_l1(self, levels: Levels) -> None:
        levels.keep(static("s"))
        assert levels.find(SegmentKind.DOCUMENT, b"s") is None

    def test_what_became_static_moves_up(self, levels: Levels, l1: MemoryTier) -> None:
        levels.keep(entry("system", kind=SegmentKind.GLUE))
        found = levels.find(SegmentKind.STATIC, b"system")
        assert found is not None
        assert keys(l1) == ["system"]
        pinned = l1.get(b"system")
        assert pinned is not None
        assert pinned.kind == SegmentKind.STATIC
        levels.discard(lambda e: e.kind == SegmentKind.GLUE)
        assert levels.find(SegmentKind.STATIC, b"system") is not None

    def test_texts_are_known_from_l2(self, levels: Levels) -> None:
        levels.keep(entry("d", text="T"))
        assert levels.knows_text(b"T")
        assert not levels.knows_text(b"U")


def test_discard_reaches_every_level(levels: Levels, l1: MemoryTier, l2: MemoryTier) -> None:
    levels.keep(static("s"))
    levels.keep(entry("d1"))
    levels.keep(entry("d2"))
    assert levels.discard(lambda e: e.key in (b"s", b"d1")) == 2
    assert (keys(l1), keys(l2)) == ([], ["d2"])


def test_stats_are_named_by_level(levels: Levels) -> None:
    levels.keep(static("s", 2))
    levels.keep(entry("d", 3))
    stats = levels.stats()
    assert {name: s.bytes for name, s in stats.items()} == {"L1": 2 * TOKEN_BYTES, "L2": 3 * TOKEN_BYTES}


class TestFaults:
    @pytest.fixture
    def broken(self) -> Levels:
        return Levels(static=BrokenTier(), document=BrokenTier())

    def test_a_failing_get_is_a_counted_miss(self, broken: Levels, caplog: pytest.LogCaptureFixture) -> None:
        assert broken.find(SegmentKind.DOCUMENT, b"d") is None
        assert broken.faults == {"get": 1}
        assert "the store is gone" in caplog.text

    def test_a_failing_put_keeps_nothing(self, broken: Levels) -> None:
        assert broken.keep(entry("d")) is False
        assert broken.faults == {"put": 1}

    def test_a_text_is_unknown(self, broken: Levels) -> None:
        assert broken.knows_text(b"T") is False

    def test_nothing_fits(self, broken: Levels) -> None:
        assert broken.fits(SegmentKind.DOCUMENT, 1) is False

    def test_nothing_is_discarded_there_but_elsewhere(self, l2: MemoryTier) -> None:
        levels = Levels(static=BrokenTier(), document=l2)
        levels.keep(entry("d"))
        assert levels.discard(lambda e: True) == 1
        assert keys(l2) == []
        assert levels.faults["discard"] == 1

    def test_a_static_prompt_is_kept_and_found_in_l2_while_l1_fails(self, l2: MemoryTier) -> None:
        levels = Levels(static=BrokenTier(), document=l2)
        assert levels.keep(static("s"))
        assert keys(l2) == ["s"]
        assert levels.find(SegmentKind.STATIC, b"s") is not None
        assert levels.faults["put"] >= 1

    def test_an_interrupt_is_no_fault(self, l1: MemoryTier) -> None:
        class Interrupted(MemoryTier):
            def get(self, key: bytes) -> Entry | None:
                raise KeyboardInterrupt

        levels = Levels(static=l1, document=Interrupted(100))
        with pytest.raises(KeyboardInterrupt):
            levels.find(SegmentKind.DOCUMENT, b"d")
