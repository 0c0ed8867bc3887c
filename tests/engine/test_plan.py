"""What is reused, what is prefilled, and why: on tiers filled by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rag_kvcache.engine.plan import Plan, Planner
from rag_kvcache.keys import KeyRing, tokens_digest
from rag_kvcache.segment import Document, Reason, Segment, SegmentKind
from rag_kvcache.tiers import Entry, Levels, MemoryTier, NullTier

K = SegmentKind
RING = KeyRing(b"model", b"tokenizer", "tenant")
IDS = np.arange(100, 150)


def segments(*parts: tuple[SegmentKind, int], ids: np.ndarray = IDS) -> list[Segment]:
    out, at = [], 0
    for i, (kind, stop) in enumerate(parts):
        document = Document(f"text {i}", id=f"d{i}") if kind == K.DOCUMENT else None
        digest = f"doc{i}".encode() if document else tokens_digest(ids[at:stop])
        out.append(Segment(kind, at, stop, digest, document))
        at = stop
    return out


FIVE = segments((K.STATIC, 10), (K.DOCUMENT, 20), (K.GLUE, 22), (K.DOCUMENT, 40), (K.QUESTION, 50))


def planner(**changes: object) -> Planner:
    levels = changes.pop("levels", None) or Levels(MemoryTier(10_000), MemoryTier(10_000))
    return replace(Planner(levels, lambda kind: RING, bytes_per_token=4, cache_history=True), **changes)


def store(p: Planner, plan: Plan, ids: np.ndarray = IDS, **changes: object) -> None:
    for step in plan.steps:
        if step.store:
            s = step.segment
            entry = Entry(
                key=step.key,
                fingerprint=RING.fingerprint,
                tenant="tenant",
                prefix_digest=step.prefix_digest,
                text_digest=s.text_digest,
                kind=s.kind,
                start=s.start,
                token_ids=ids[s.start : s.stop].copy(),
                planes=(torch.zeros(1, 1, s.tokens, 1),),
                documents=step.documents,
            )
            p.levels.keep(replace(entry, **changes))


def outline(plan: Plan) -> list[tuple[str, int, int, str]]:
    return [(str(s.segment.kind), s.segment.tokens, s.reused, str(s.reason)) for s in plan.steps]


def test_first_sight_stores_all_but_the_question() -> None:
    plan = planner().plan(IDS, FIVE)
    assert [s.store for s in plan.steps] == [True, True, True, True, False]
    assert plan.reused == 0
    assert plan.reason == Reason.FIRST_SEEN
    assert [d.label for d in plan.steps[3].documents] == ["d1", "d3"]


def test_the_second_time_all_but_the_question_is_reused() -> None:
    p = planner()
    store(p, p.plan(IDS, FIVE))
    plan = p.plan(IDS, FIVE)
    assert plan.reused == 40
    assert plan.reason == Reason.EXACT_PREFIX
    assert not any(s.store for s in plan.steps)


def test_a_gap_ends_the_chain_though_later_segments_are_cached() -> None:
    p = planner()
    first = p.plan(IDS, FIVE)
    store(p, first)
    p.levels.discard(lambda e: e.key == first.steps[1].key)
    plan = p.plan(IDS, FIVE)
    assert [s.reused for s in plan.steps] == [10, 0, 0, 0, 0]
    assert plan.steps[1].reason == Reason.FIRST_SEEN
    assert plan.steps[3].reason == Reason.OTHER_PREFIX, "its text is cached, but cannot be reached"


def test_edge_tokens_join_what_follows() -> None:
    p = planner()
    store(p, p.plan(IDS, FIVE))
    other = IDS.copy()
    other[19] = 7  # the first document's last token
    changed = segments(
        (K.STATIC, 10), (K.DOCUMENT, 20), (K.GLUE, 22), (K.DOCUMENT, 40), (K.QUESTION, 50), ids=other
    )
    plan = p.plan(other, changed)
    assert outline(plan)[:3] == [
        ("static", 10, 10, "exact_prefix"),
        ("document", 9, 9, "edge_tokens"),
        ("glue", 3, 0, "first_seen"),
    ]
    assert sum(s.segment.tokens for s in plan.steps) == 50
    store(p, plan, other)
    assert p.plan(other, changed).reused == 40, "the next time nothing is missing"


def test_edge_tokens_before_a_document_become_glue_of_their_own() -> None:
    p = planner()
    parts = ((K.DOCUMENT, 20), (K.DOCUMENT, 40), (K.QUESTION, 50))
    store(p, p.plan(IDS, segments(*parts)))
    other = IDS.copy()
    other[19] = 7
    plan = p.plan(other, segments(*parts, ids=other))
    assert outline(plan)[:3] == [
        ("document", 19, 19, "edge_tokens"),
        ("glue", 1, 0, "first_seen"),
        ("document", 20, 0, "other_prefix"),
    ]


def test_an_entry_that_fits_in_small_part_is_made_anew() -> None:
    p = planner()
    store(p, p.plan(IDS, FIVE))
    other = IDS.copy()
    other[13:20] = 7
    changed = segments(
        (K.STATIC, 10), (K.DOCUMENT, 20), (K.GLUE, 22), (K.DOCUMENT, 40), (K.QUESTION, 50), ids=other
    )
    step = p.plan(other, changed).steps[1]
    assert (step.reused, step.store, step.reason) == (0, True, Reason.FOREIGN_ENTRY)


def test_a_foreign_entry_under_the_right_key_is_never_used() -> None:
    for change in ({"fingerprint": b"x"}, {"prefix_digest": b"x"}, {"start": 1}, {"token_ids": IDS[:10] + 1}):
        p = planner()
        store(p, p.plan(IDS, FIVE), **change)
        plan = p.plan(IDS, FIVE)
        assert plan.steps[0].reused == 0, change
        assert plan.steps[0].reason == Reason.FOREIGN_ENTRY


def test_a_prompt_wholly_cached_gives_its_last_token_back() -> None:
    p = planner()
    parts = segments((K.STATIC, 10), (K.DOCUMENT, 50))
    store(p, p.plan(IDS, parts))
    plan = p.plan(IDS, parts)
    assert plan.reused == 49
    assert plan.steps[-1].reason == Reason.LAST_TOKEN


def test_nothing_behind_a_question_is_looked_up_or_stored() -> None:
    p = planner()
    parts = segments((K.GLUE, 10), (K.QUESTION, 20), (K.DOCUMENT, 40), (K.QUESTION, 50))
    store(p, p.plan(IDS, parts))
    plan = p.plan(IDS, parts)
    assert [s.reused for s in plan.steps] == [10, 0, 0, 0]
    assert (plan.steps[2].store, plan.steps[2].reason) == (False, Reason.QUESTION_FIRST)


def test_what_is_cached_in_one_piece_is_found_whatever_the_pieces_are_today() -> None:
    p = planner()
    whole = segments((K.GLUE, 20), (K.DOCUMENT, 40), (K.QUESTION, 50))
    store(p, p.plan(IDS, whole))
    pieces = segments((K.STATIC, 8), (K.GLUE, 20), (K.DOCUMENT, 40), (K.QUESTION, 50))
    pieces[2] = replace(pieces[2], text_digest=whole[1].text_digest)
    assert p.plan(IDS, pieces).reused == 40


def reasons(plan: Plan) -> Sequence[Reason]:
    return [s.reason for s in plan.steps]


def test_levels_switched_off_and_segments_too_large() -> None:
    off = planner(levels=Levels(MemoryTier(10_000), NullTier()))
    plan = off.plan(IDS, FIVE)
    assert [s.store for s in plan.steps] == [True, False, False, False, False]
    assert reasons(plan)[1] == Reason.LEVEL_OFF
    small = planner(levels=Levels(MemoryTier(10_000), MemoryTier(50)))
    plan = small.plan(IDS, FIVE)
    assert [s.store for s in plan.steps] == [True, True, True, False, False]
    assert reasons(plan)[3] == Reason.TOO_LARGE


def test_history_is_left_out_when_asked() -> None:
    parts = segments((K.HISTORY, 10), (K.DOCUMENT, 40), (K.QUESTION, 50))
    plan = planner(cache_history=False).plan(IDS, parts)
    assert [s.store for s in plan.steps] == [False, True, False]
    assert reasons(plan)[0] == Reason.LEVEL_OFF
