"""Reports: plain JSON, readable, and their sums add up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rag_kvcache.engine.account import Ledger
from rag_kvcache.report import Chunk, Generation, Report, SegmentReport, Stats, Usage
from rag_kvcache.segment import Level, Outcome, Reason, SegmentKind
from rag_kvcache.tiers import Levels, NullTier

STATIC = SegmentReport(SegmentKind.STATIC, Level.STATIC, 20, 20, Outcome.HIT, Reason.EXACT_PREFIX)
KETTLE = SegmentReport(
    SegmentKind.DOCUMENT, Level.DOCUMENT, 70, 50, Outcome.HIT, Reason.EDGE_TOKENS, "kettle"
)
QUESTION = SegmentReport(SegmentKind.QUESTION, Level.QUESTION, 10, 0, Outcome.PREFILLED, Reason.QUESTION)


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "ttft_s": 0.012,
        "total_s": 0.5,
        "prompt_tokens": 100,
        "reused_tokens": 70,
        "prefilled_tokens": 30,
        "mode": "exact",
        "reason": Reason.EXACT_PREFIX,
        "segments": (STATIC, KETTLE, QUESTION),
    }
    return Report(**fields | changes)


def kinds_of(value: Any) -> set[type]:
    """The exact types of a value and of all that it holds."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {type(value)}.union(*map(kinds_of, inner))


class TestToDict:
    def test_holds_plain_json_types_only(self) -> None:
        kinds = kinds_of(report().to_dict())
        assert kinds <= {dict, list, str, int, float, bool, type(None)}

    def test_comes_back_from_json_as_it_was(self) -> None:
        plain = report(ttft_s=None).to_dict()
        assert json.loads(json.dumps(plain)) == plain

    def test_names_enum_members_by_their_values(self) -> None:
        plain = report().to_dict()
        assert plain["reason"] == "exact_prefix"
        assert plain["segments"][1] == {
            "kind": "document",
            "level": "L2",
            "tokens": 70,
            "reused": 50,
            "outcome": "hit",
            "reason": "edge_tokens",
            "label": "kettle",
            "moved_by": None,
            "recomputed": 0,
        }


class TestText:
    def test_says_what_was_saved_and_why(self) -> None:
        first, *rest = str(report()).splitlines()
        assert "12 ms" in first
        assert "100 prompt tokens = 70 reused + 30 prefilled" in first
        assert "exact_prefix" in first
        assert len(rest) == 3
        for part in ("L2", "document", "50/70", "hit", "edge_tokens", "kettle"):
            assert part in rest[1]

    def test_shows_no_python_representation(self) -> None:
        assert "<" not in str(report())
        assert "Reason." not in str(report())
        assert "None" not in str(report())

    def test_columns_line_up(self) -> None:
        lines = str(report()).splitlines()[1:]
        assert len({line.index("/") for line in lines}) == 1

    def test_no_token_is_said_in_words(self) -> None:
        assert "no token" in str(report(ttft_s=None))


def test_segments_can_be_asked_for_by_kind() -> None:
    assert list(report().of_kind("document")) == list(report().of_kind(SegmentKind.DOCUMENT)) == [KETTLE]
    assert list(report().of_kind("history")) == []


def test_usage_adds_up() -> None:
    assert Usage(prompt_tokens=100, completion_tokens=7, cached_tokens=70).total_tokens == 107


def test_only_the_last_chunk_has_a_report() -> None:
    done = Generation("text", (1, 2), "stop", Usage(100, 2, 70), report())
    assert Chunk("a").report is None
    assert Chunk("", done).report is done.report


class TestStats:
    @pytest.fixture
    def levels(self) -> Levels:
        return Levels(NullTier(), NullTier())

    def test_the_reuse_ratio_is_a_share_of_all_prompt_tokens(self) -> None:
        stats = Stats(2, 200, 50, 150, {}, {}, {}, {})
        assert stats.reuse_ratio == 0.25
        assert Stats(0, 0, 0, 0, {}, {}, {}, {}).reuse_ratio == 0.0

    def test_add_up_over_requests(self, levels: Levels) -> None:
        ledger = Ledger()
        ledger.add(report())
        ledger.add(report(reused_tokens=0, prefilled_tokens=100, segments=(QUESTION,)))
        stats = ledger.stats(levels)
        assert stats.requests == 2
        assert stats.prompt_tokens == stats.reused_tokens + stats.prefilled_tokens == 200
        assert stats.lookups == {"L1": 1, "L2": 1, "L3": 2}
        assert stats.hits == {"L1": 1, "L2": 1, "L3": 0}

    def test_uncached_requests_look_nothing_up(self, levels: Levels) -> None:
        ledger = Ledger()
        ledger.add(report(mode="off", reused_tokens=0, prefilled_tokens=100))
        assert ledger.stats(levels).lookups == {}
        assert ledger.stats(levels).requests == 1

    def test_are_a_copy(self, levels: Levels) -> None:
        ledger = Ledger()
        ledger.add(report())
        before = ledger.stats(levels)
        ledger.add(report())
        levels.faults["get"] += 1
        assert before.lookups["L1"] == 1
        assert before.faults == {}
