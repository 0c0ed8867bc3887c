"""Adds up what requests did: the report of one, the counters of all."""

from __future__ import annotations

from collections import Counter
from threading import Lock

from rag_kvcache.report import Report, Stats
from rag_kvcache.tiers import Levels


class Ledger:
    """Running totals of an engine, thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._totals: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._lookups: Counter[str] = Counter()

    def add(self, report: Report) -> None:
        """Count a finished request."""
        with self._lock:
            self._totals["requests"] += 1
            for name in ("prompt_tokens", "reused_tokens", "prefilled_tokens"):
                self._totals[name] += getattr(report, name)
            for s in report.segments if report.mode != "off" else ():
                self._lookups[str(s.level)] += 1
                self._hits[str(s.level)] += s.reused > 0

    def stats(self, levels: Levels) -> Stats:
        """The totals, with what the tiers hold now."""
        with self._lock:
            return Stats(
                requests=self._totals["requests"],
                prompt_tokens=self._totals["prompt_tokens"],
                reused_tokens=self._totals["reused_tokens"],
                prefilled_tokens=self._totals["prefilled_tokens"],
                hits=dict(self._hits),
                lookups=dict(self._lookups),
                faults=dict(levels.faults),
                tiers=levels.stats(),
            )
