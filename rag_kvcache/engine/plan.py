"""Decides for every segment of a prompt: reuse (and how much), or prefill (and why, and whether to store)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rag_kvcache.keys import KeyRing, TokenChain, TokenIds, tokens_digest
from rag_kvcache.report import SegmentReport
from rag_kvcache.segment import Outcome, Reason, Segment, SegmentKind
from rag_kvcache.tiers import DocumentRef, Entry, Levels, level_of

KeyRings = Callable[[SegmentKind], KeyRing]
"""The keys for a kind of segment: static prompts may be shared between tenants."""


_FLUID = (SegmentKind.STATIC, SegmentKind.GLUE)  # kinds whose borders move as prompts are learnt


@dataclass(frozen=True)
class Moved:
    """Tokens [first, first + tokens) of ``entry`` stand at positions [at, at + tokens) of this prompt.

    distance: positions their keys are moved by. recomputed: how many are computed anew after all.
    """

    entry: Entry
    first: int
    at: int
    tokens: int
    distance: int
    recomputed: int = 0


@dataclass(frozen=True)
class Step:
    """One segment's part in the plan.

    reused: tokens taken from the cache: from ``entry``, which was computed at this place, or as ``moved``
    says from one that was computed elsewhere. store: keep the segment's KV once it is computed.
    prefix_digest, key, documents: what its entry is, or would be, stored with.
    """

    segment: Segment
    reason: Reason
    reused: int = 0
    entry: Entry | None = None
    store: bool = False
    prefix_digest: bytes = b""
    key: bytes = b""
    documents: tuple[DocumentRef, ...] = ()
    moved: Moved | None = None

    def report(self) -> SegmentReport:
        """The step as the user sees it."""
        if self.moved is not None:
            outcome, distance, recomputed = Outcome.MOVED, self.moved.distance, self.moved.recomputed
        else:
            built = Outcome.BUILT if self.store else Outcome.PREFILLED
            outcome, distance, recomputed = built if self.entry is None else Outcome.HIT, None, 0
        s = self.segment
        return SegmentReport(
            kind=s.kind,
            level=level_of(s.kind),
            tokens=s.tokens,
            reused=self.reused,
            outcome=outcome,
            reason=self.reason,
            label=None if s.document is None else s.document.id,
            moved_by=distance,
            recomputed=recomputed,
        )


@dataclass(frozen=True)
class Plan:
    """Steps in prompt order. Those with an entry come first: exact reuse is a prefix. Moved ones follow."""

    steps: tuple[Step, ...]
    reason: Reason

    @property
    def exact(self) -> int:
        """Length of the prefix that is reused exactly."""
        return sum(step.reused for step in self.steps if step.moved is None)

    @property
    def moved(self) -> tuple[tuple[Segment, Moved], ...]:
        """The documents that are reused behind other text."""
        return tuple((step.segment, step.moved) for step in self.steps if step.moved is not None)

    @property
    def reused(self) -> int:
        """Prompt tokens that come from the cache."""
        return sum(step.reused for step in self.steps)

    def unstored(self, reason: Reason) -> Plan:
        """The same plan, had it not been allowed to store anything."""
        return replace(
            self, steps=tuple(replace(s, store=False, reason=reason) if s.store else s for s in self.steps)
        )


def prefill_all(segments: Sequence[Segment], reason: Reason) -> Plan:
    """Reuse nothing and store nothing, for one reason."""
    return Plan(tuple(Step(s, reason) for s in segments), reason)


@dataclass(frozen=True)
class Planner:
    """Plans exact reuse: the longest chain of cached segments from the prompt's beginning.

    bytes_per_token: KV size, to know before computing whether a segment could be kept.
    epoch: the memory's when the plan is made; it moves on with every invalidation.
    """

    levels: Levels
    keys: KeyRings
    bytes_per_token: int
    cache_history: bool
    epoch: int = 0

    def plan(self, ids: TokenIds, segments: Sequence[Segment]) -> Plan:
        """Walk the segments, following the chain as long as it is cached.

        When an entry fits but for its last tokens (its neighbour changed the edge), what fits is reused and
        the rest of the segment joins what follows.
        """
        walk = _Walk(self, ids)
        queue = list(segments)
        while queue:
            step, used = walk.take_longest(queue)
            del queue[:used]
            if step.reused and step.reused < step.segment.tokens:
                step, rest = _split(step)
                queue[:1] = _joined(rest, queue[:1], ids)
            walk.follow(step)
        return _give_back_last(walk.steps, len(ids))


class _Walk:
    """The state of a plan in the making: the chain so far, and whether it is still cached."""

    def __init__(self, planner: Planner, ids: TokenIds) -> None:
        self._planner, self._ids = planner, ids
        self._chain = TokenChain()
        self._documents: tuple[DocumentRef, ...] = ()
        self._unbroken = True
        self._asked = False
        self.steps: list[Step] = []

    def take_longest(self, queue: Sequence[Segment]) -> tuple[Step, int]:
        """What to do next, and how many segments that covers.

        What is static is learnt as prompts come, so the text before a document may have been stored in other
        pieces than today's: the longest run of them that is cached in one piece is taken.
        """
        run = next((i for i, s in enumerate(queue) if s.kind not in _FLUID), len(queue))
        for length in range(run, 1, -1):
            merged = _merged(queue[:length], self._ids)
            if self._unbroken and (step := self.take(merged)).reused == merged.tokens:
                return step, length
        return self.take(queue[0]), 1

    def take(self, segment: Segment) -> Step:
        """What to do with the next segment."""
        if segment.kind == SegmentKind.QUESTION:
            return Step(segment, Reason.QUESTION)
        if self._asked:  # what was computed behind a question holds traces of it
            return Step(segment, Reason.QUESTION_FIRST)
        prefix = self._chain.digest()
        documents = self._documents
        if segment.document is not None:
            documents = (*documents, DocumentRef(segment.text_digest, segment.document.id))
        step = Step(
            segment,
            Reason.FIRST_SEEN,
            prefix_digest=prefix,
            key=self._planner.keys(segment.kind).key(prefix, segment.text_digest),
            documents=documents,
        )
        return self._looked_up(step) if self._unbroken else self._missed(step)

    def follow(self, step: Step) -> None:
        """Go on behind a step."""
        self.steps.append(step)
        segment = step.segment
        self._chain.extend(self._ids[segment.start : segment.stop])
        self._documents = step.documents or self._documents
        self._unbroken = self._unbroken and step.reused == segment.tokens
        self._asked = self._asked or segment.kind == SegmentKind.QUESTION

    def _looked_up(self, step: Step) -> Step:
        s = step.segment
        entry = self._planner.levels.find(s.kind, step.key)
        if entry is None:
            return self._missed(step)
        fingerprint = self._planner.keys(s.kind).fingerprint
        usable = entry.usable_tokens(fingerprint, step.prefix_digest, s.start, self._ids[s.start : s.stop])
        # An entry that fits in small part only was made of the same text cut differently: make it anew.
        if usable * 2 < min(entry.tokens, s.tokens) or usable == 0:
            return replace(self._missed(step), reason=Reason.FOREIGN_ENTRY)
        return replace(step, entry=entry, reused=usable, reason=Reason.EXACT_PREFIX)

    def _missed(self, step: Step) -> Step:
        s, planner = step.segment, self._planner
        if s.kind == SegmentKind.HISTORY and not planner.cache_history:
            return replace(step, reason=Reason.LEVEL_OFF)
        if not planner.levels.fits(s.kind, s.tokens * planner.bytes_per_token):
            off = not planner.levels.fits(s.kind, 0)
            return replace(step, reason=Reason.LEVEL_OFF if off else Reason.TOO_LARGE)
        elsewhere = s.document is not None and planner.levels.knows_text(s.text_digest)
        return replace(step, store=True, reason=Reason.OTHER_PREFIX if elsewhere else Reason.FIRST_SEEN)


def _merged(run: Sequence[Segment], ids: TokenIds) -> Segment:
    """Neighbouring segments as one."""
    whole = replace(run[-1], start=run[0].start)
    return replace(whole, text_digest=tokens_digest(ids[whole.start : whole.stop]))


def _split(step: Step) -> tuple[Step, Segment]:
    """A partly fitting step cut down to what fits, and the rest of its segment."""
    s = step.segment
    at = s.start + step.reused
    fits = replace(step, segment=replace(s, stop=at), reason=Reason.EDGE_TOKENS)
    return fits, replace(s, kind=SegmentKind.GLUE, start=at, document=None)


def _joined(rest: Segment, following: Sequence[Segment], ids: TokenIds) -> list[Segment]:
    """``rest`` merged into the following segment, unless that is a document, whose name is its text."""
    if following and following[0].document is None:
        rest = replace(following[0], start=rest.start)
        following = ()
    return [replace(rest, text_digest=tokens_digest(ids[rest.start : rest.stop])), *following]


def _give_back_last(steps: list[Step], tokens: int) -> Plan:
    """A prompt that is wholly cached still runs its last token: the first new token needs its logits."""
    if steps and sum(step.reused for step in steps) == tokens:
        steps[-1] = replace(steps[-1], reused=steps[-1].reused - 1, reason=Reason.LAST_TOKEN)
    return Plan(tuple(steps), _why(steps))


def _why(steps: Sequence[Step]) -> Reason:
    """The first reason why the chain of reuse ended before the question, if it did."""
    if any(step.reason == Reason.QUESTION_FIRST for step in steps):
        return Reason.QUESTION_FIRST
    fine = (Reason.EXACT_PREFIX, Reason.EDGE_TOKENS, Reason.LAST_TOKEN, Reason.QUESTION)
    ended = next((step.reason for step in steps if step.reason not in fine), None)
    if ended is not None:
        return ended
    reused = any(step.reused for step in steps)
    return Reason.EXACT_PREFIX if reused else Reason.QUESTION
