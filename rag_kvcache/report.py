"""What a request returns: the text, and an account of what was reused and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rag_kvcache.segment import Level, Outcome, Reason, SegmentKind


@dataclass(frozen=True)
class SegmentReport:
    """One segment's account. ``reused`` of its ``tokens`` came from the cache.

    moved_by: positions its cached keys were moved by; None when they were not.
    recomputed: how many tokens that were in the cache were computed anew to repair it.
    """

    kind: SegmentKind
    level: Level
    tokens: int
    reused: int
    outcome: Outcome
    reason: Reason
    label: str | None = None
    moved_by: int | None = None
    recomputed: int = 0

    def __str__(self) -> str:
        moved = "" if self.moved_by is None else f" by {self.moved_by:+}, {self.recomputed} recomputed"
        label = f"  {self.label}" if self.label else ""
        return (
            f"{self.level} {self.kind:<9} {self.reused:>5}/{self.tokens:<5} {self.outcome:<9} "
            f"{self.reason}{moved}{label}"
        )


@dataclass(frozen=True)
class Report:
    """What one request cost and saved.

    ttft_s: seconds from the call to the first token, waiting, assembly and repair included; None
        when no token was generated.
    reused_tokens + prefilled_tokens == prompt_tokens.
    mode: the reuse mode the request ran in ("exact", "gated", "always" or "off").
    reason: why nothing, or not more, was reused; EXACT_PREFIX when all went well, MOVED when documents
        were reused behind other text: the answer is then an approximation.
    gate, similarity: what the gate said (``gate.Verdict``), and how similar the most similar earlier
        question was, in [-1, 1]; None when it was not asked or had nothing to compare.
    repair: the method that chose what was recomputed of moved documents; None when nothing was moved.
    """

    ttft_s: float | None
    total_s: float
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    mode: str
    reason: Reason
    segments: tuple[SegmentReport, ...] = ()
    gate: str | None = None
    similarity: float | None = None
    repair: str | None = None

    @property
    def recomputed_tokens(self) -> int:
        """Tokens of moved documents that were computed anew; part of ``prefilled_tokens``."""
        return sum(s.recomputed for s in self.segments)

    @property
    def exact(self) -> bool:
        """Whether the answer is the one an uncached run gives."""
        return all(s.moved_by is None for s in self.segments)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return asdict(self, dict_factory=_plain)

    def of_kind(self, kind: SegmentKind | str) -> Iterator[SegmentReport]:
        """The segments of one kind, in prompt order."""
        return (s for s in self.segments if s.kind == kind)

    def __str__(self) -> str:
        ttft = "no token" if self.ttft_s is None else f"first token after {self.ttft_s * 1e3:.0f} ms"
        lines = [
            f"{self.mode}: {ttft}, {self.prompt_tokens} prompt tokens = "
            f"{self.reused_tokens} reused + {self.prefilled_tokens} prefilled ({self.reason})"
        ]
        if self.gate is not None:
            compared = "" if self.similarity is None else f", similarity {self.similarity:.2f}"
            repaired = "" if self.repair is None else f", repaired by {self.repair}"
            lines.append(f"  gate: {self.gate}{compared}{repaired}")
        return "\n".join([*lines, *(f"  {s}" for s in self.segments)])


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # StrEnum members are strings and tuples dump as lists, but json/yaml writers and `type(x) is str`
    # checks want plain ones.
    return {k: _plain_value(v) for k, v in pairs}


def _plain_value(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Usage:
    """Token counts in the words of OpenAI-style APIs. ``cached_tokens`` is part of ``prompt_tokens``."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    text: the new text only, no prompt, cut before a stop string.
    token_ids: the generated ids, stop and end-of-sequence tokens included.
    finish_reason: "stop" (end of sequence, or a stop string), "length", or "cancelled".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    report: Report


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer. The last chunk of a stream, and only it, carries ``generation``."""

    text: str
    generation: Generation | None = None

    @property
    def report(self) -> Report | None:
        """The finished request's report, on the last chunk."""
        return None if self.generation is None else self.generation.report


@dataclass(frozen=True)
class WarmReport:
    """What ``engine.warm`` did: documents built, found cached, and not storable (with the reason)."""

    documents: int
    built: int
    cached: int
    skipped: tuple[tuple[str, Reason], ...]
    tokens: int
    seconds: float


@dataclass(frozen=True)
class TierStats:
    """Entries and bytes held by one tier, and how entries left it."""

    entries: int
    bytes: int
    max_bytes: int
    evicted: int
    expired: int


@dataclass(frozen=True)
class Stats:
    """Counters since the engine was made, and what its tiers hold now."""

    requests: int
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    hits: dict[str, int]
    lookups: dict[str, int]
    faults: dict[str, int]
    tiers: dict[str, TierStats]

    @property
    def reuse_ratio(self) -> float:
        """Share of all prompt tokens that came from the cache."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
