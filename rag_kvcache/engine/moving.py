"""Widens an exact plan: documents that are cached behind the static prompt alone are moved to their place.

Such an entry is called *canonical*. It is the very entry that serves the document exactly when it comes
first; one that was computed behind other documents holds traces of them and is never moved.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rag_kvcache.engine.plan import Moved, Plan, Planner, Step
from rag_kvcache.keys import TokenIds
from rag_kvcache.segment import Reason, Segment, SegmentKind
from rag_kvcache.tiers import Entry

_SLACK = 8  # tokens by which a document's beginning may differ: its neighbours change only the edges


def canonical_key(planner: Planner, static: bytes, segment: Segment) -> bytes:
    """Name of a document's canonical entry; ``static``: digest of the static prompt's tokens."""
    return planner.keys(SegmentKind.DOCUMENT).key(static, segment.text_digest)


def widened(plan: Plan, ids: TokenIds, planner: Planner, static: bytes, start: int) -> Plan:
    """The plan with every document moved that has a canonical entry and no exact one.

    static: digest of the static prompt, which has ``start`` tokens. What is computed behind a moved document
    is an approximation, and is not stored.
    """
    steps: list[Step] = []
    behind = False
    for step in plan.steps:
        moved = _moved(step, ids, planner, static, start)
        if moved is not None:
            steps.append(moved)
            behind = True
        elif behind and step.store:
            steps.append(replace(step, store=False, reason=Reason.BEHIND_MOVED))
        else:
            steps.append(step)
    return Plan(tuple(steps), Reason.MOVED if behind else plan.reason)


def refused(plan: Plan, movable: Plan, reason: Reason) -> Plan:
    """The exact plan, which says why the documents that ``movable`` moves are not."""
    steps = tuple(
        replace(exact, reason=reason) if wide.moved is not None else exact
        for exact, wide in zip(plan.steps, movable.steps, strict=True)
    )
    return Plan(steps, reason)


def overlap(stored: TokenIds, wanted: TokenIds, slack: int = _SLACK) -> tuple[int, int, int]:
    """The longest run of equal tokens: (first in ``stored``, first in ``wanted``, tokens).

    Beginnings may be shifted against each other by at most ``slack`` tokens.
    """
    best = (0, 0, 0)
    for shift in sorted(range(-slack, slack + 1), key=abs):
        first, at = max(0, shift), max(0, -shift)
        n = min(len(stored) - first, len(wanted) - at)
        if n <= best[2]:
            continue
        differs = np.flatnonzero(stored[first : first + n] != wanted[at : at + n])
        ends = np.concatenate([[-1], differs, [n]])
        lengths = np.diff(ends) - 1
        longest = int(lengths.argmax())
        if lengths[longest] > best[2]:
            begin = int(ends[longest]) + 1
            best = (first + begin, at + begin, int(lengths[longest]))
    return best


def _moved(step: Step, ids: TokenIds, planner: Planner, static: bytes, start: int) -> Step | None:
    s = step.segment
    if s.kind != SegmentKind.DOCUMENT or step.entry is not None or step.reason == Reason.QUESTION_FIRST:
        return None
    entry = planner.levels.find(s.kind, canonical_key(planner, static, s))
    if entry is None or not _belongs(entry, planner, static, start):
        return None
    first, at, tokens = overlap(entry.token_ids, ids[s.start : s.stop])
    if s.start + at + tokens == len(ids):  # the first new token needs the logits of the last
        tokens -= 1
    if tokens * 2 < s.tokens or tokens == 0:
        return None
    at += s.start
    return replace(
        step,
        reused=tokens,
        store=False,
        reason=Reason.MOVED,
        moved=Moved(entry, first, at, tokens, distance=at - (start + first)),
    )


def _belongs(entry: Entry, planner: Planner, static: bytes, start: int) -> bool:
    """The key alone is never trusted."""
    fingerprint = planner.keys(SegmentKind.DOCUMENT).fingerprint
    return (entry.fingerprint, entry.prefix_digest, entry.start) == (fingerprint, static, start)
