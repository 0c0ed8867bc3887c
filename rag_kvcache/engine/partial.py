"""Partial reuse: what is done, beyond exact prefixes, for requests that accept an approximation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from rag_kvcache.blend import (
    Composed,
    Deviation,
    FirstK,
    MovedRun,
    Nothing,
    Profile,
    Repair,
    TwoPass,
)
from rag_kvcache.blend.score import Asked, attention_paid, telling_layers
from rag_kvcache.engine.moving import refused, widened
from rag_kvcache.engine.plan import Plan, Planner
from rag_kvcache.engine.profiles import AttentionProfile, Profiles
from rag_kvcache.engine.request import Request
from rag_kvcache.gate import Decision, Gate, Scope
from rag_kvcache.keys import TokenChain, TokenIds, text_digest
from rag_kvcache.model.arena import Arena
from rag_kvcache.model.attention import Listener
from rag_kvcache.model.language_model import LanguageModel
from rag_kvcache.prompt.read import ReadPrompt
from rag_kvcache.segment import Reason, SegmentKind
from rag_kvcache.settings import Settings

_MAX_ASKING = 128  # of a prompt's last tokens, these at most count as asking


class Attempt(Protocol):
    """One request's part in partial reuse. Its methods are called in this order, the model's lock held."""

    decision: Decision | None
    repaired_by: str | None

    def widened(self, plan: Plan, planner: Planner, static: int) -> Plan:
        """The exact plan, with documents moved where allowed; ``static``: tokens of the static prompt."""

    def moved_into(self, arena: Arena, plan: Plan) -> Plan:
        """Place moved documents; the arena then awaits all that the plan does not reuse."""

    @property
    def listener(self) -> Listener | None:
        """Hears the answer's forwards."""

    def learn(self, arena: Arena) -> None:
        """The answer is complete."""


class Partial:
    """Makes an ``Attempt`` of each request.

    gate: None where the engine was made without one; questions then count as unlike any earlier one.
    """

    def __init__(self, model: LanguageModel, gate: Gate | None, settings: Settings) -> None:
        self.model, self.gate = model, gate
        self.profiles = Profiles(settings.ttl_s)
        self._share, self._repair = settings.recompute_share, settings.repair
        share = settings.recompute_share
        methods: Sequence[Repair] = (Nothing(), FirstK(), Deviation(share), Profile(share), TwoPass(share))
        self._methods: Mapping[str, Repair] = {method.name: method for method in methods}

    def attempt(self, request: Request, prompt: ReadPrompt) -> Attempt:
        """For a request that accepts approximations, one that starts to embed its question at once."""
        if request.reuse not in ("gated", "always") or not prompt.layout.documents:
            return ExactOnly()
        if self.gate is not None:
            self.gate.prepare(request.question)
        return Approximate(self, request, prompt)

    def method(self, *, guided: bool) -> Repair:
        """How to choose what is computed anew; ``guided``: a similar question's attention is known."""
        if self._repair == "auto":
            return self._methods["profile" if guided else "two_pass"]
        return self._methods[self._repair]

    def forget(self, tenant: str, document: bytes | None = None) -> None:
        """Forget earlier questions, about one document or all."""
        self.profiles.forget(tenant, document)
        if self.gate is not None:
            self.gate.forget(tenant, document)

    def close(self) -> None:
        """Forget everything."""
        self.profiles.clear()
        if self.gate is not None:
            self.gate.close()


class ExactOnly:
    """The attempt of a request that accepts no approximation."""

    decision: Decision | None = None
    repaired_by: str | None = None
    listener: Listener | None = None

    def widened(self, plan: Plan, planner: Planner, static: int) -> Plan:
        """As it is."""
        return plan

    def moved_into(self, arena: Arena, plan: Plan) -> Plan:
        """Nothing was moved."""
        return plan

    def learn(self, arena: Arena) -> None:
        """Nothing."""


class Approximate:
    """The attempt of a request in mode "gated" or "always"."""

    def __init__(self, partial: Partial, request: Request, prompt: ReadPrompt) -> None:
        self._partial, self._request, self._prompt = partial, request, prompt
        self._scope: Scope | None = None
        self._guides: dict[bytes, AttentionProfile] = {}
        self._hearing: _Hearing | None = None
        self.decision: Decision | None = None
        self.repaired_by: str | None = None

    @property
    def listener(self) -> Listener | None:
        """Takes down the queries of the question's tokens."""
        return None if self._hearing is None else self._hearing.listen

    def widened(self, plan: Plan, planner: Planner, static: int) -> Plan:
        """Move what has a canonical entry, if the gate lets this question pass."""
        ids, model = self._prompt.ids, self._partial.model
        prefix = _digest(ids[:static])
        wide = widened(plan, ids, planner, prefix, static)
        if model.moves.rotations is None:
            return refused(plan, wide, Reason.NOT_MOVABLE) if wide.moved else plan
        fingerprint = planner.keys(SegmentKind.DOCUMENT).fingerprint
        self._scope = Scope(self._request.tenant, fingerprint, prefix)
        self._hearing = _Hearing(telling_layers(len(model.moves.rotations), model.full_layers), self._asking)
        if not wide.moved:
            return plan
        if not self._passed(wide) and self._request.reuse == "gated":
            return refused(plan, wide, Reason.NOT_ALLOWED)
        return wide

    def moved_into(self, arena: Arena, plan: Plan) -> Plan:
        """Place what was moved, choose what of it to compute anew; the arena awaits that and all the rest."""
        moved, rotations = plan.moved, self._partial.model.moves.rotations
        if not moved or rotations is None:
            return plan
        for _, m in moved:
            arena.place_moved(m.entry.planes, m.first, m.at, m.tokens, m.distance, rotations)
        prompt = self._composed(arena, plan)
        method = self._partial.method(guided=bool(self._guides))
        self.repaired_by = method.name
        chosen = method.choose(prompt)
        arena.await_slots(torch.cat([prompt.awaited, chosen]).sort().values, len(prompt.ids))
        return _with_recomputed(plan, chosen)

    def learn(self, arena: Arena) -> None:
        """Remember the question, and what it paid attention to, for every document of the prompt."""
        if self._partial.gate is None or self._scope is None or self._hearing is None:
            return
        ids, spans = self._prompt.ids, self._prompt.layout.documents
        digests = [text_digest(document.text) for _, _, document in spans]
        question = self._partial.gate.learn(self._request.question, digests, self._scope)
        if question is None or not self._hearing.heard:
            return
        paid = attention_paid(arena, self._hearing.heard, len(ids)).numpy()
        for digest, (start, stop, _) in zip(digests, spans, strict=True):
            profile = AttentionProfile(ids[start:stop].copy(), paid[start:stop].copy())
            self._partial.profiles.put(self._scope, digest, question, profile)

    @property
    def _asking(self) -> int:
        """How many of the last tokens are the question and what stands behind it."""
        return max(1, min(_MAX_ASKING, len(self._prompt.ids) - self._prompt.layout.tail))

    def _passed(self, wide: Plan) -> bool:
        """Whether a similar question was asked about every moved document; what it looked at is kept."""
        gate, scope = self._partial.gate, self._scope
        if gate is None or scope is None:
            return False
        digests = list(dict.fromkeys(segment.text_digest for segment, _ in wide.moved))
        self.decision = gate.decide(self._request.question, digests, scope)
        found = [
            (d, self._partial.profiles.get(scope, d, question))
            for d, question in zip(digests, self.decision.matched, strict=False)
        ]
        guides = {d: profile for d, profile in found if profile is not None}
        # One that is missing would count as unimportant: then this question looks for itself.
        self._guides = guides if len(guides) == len(digests) else {}
        return self.decision.allow

    def _composed(self, arena: Arena, plan: Plan) -> Composed:
        """The prompt as the repair methods see it."""
        ids, exact = self._prompt.ids, plan.exact
        first_document = self._prompt.layout.documents[0][0]
        runs = []
        in_arena = np.zeros(len(ids), dtype=bool)
        in_arena[:exact] = True
        for segment, m in plan.moved:
            in_arena[m.at : m.at + m.tokens] = True
            guide = self._guides.get(segment.text_digest)
            profile = None if guide is None else guide.on(ids[m.at : m.at + m.tokens])
            runs.append(MovedRun(m.at, m.tokens, segment.start > first_document, profile))
        awaited = torch.from_numpy(np.flatnonzero(~in_arena))
        asking = min(self._asking, int((~in_arena[::-1]).argmin()) or len(ids))
        return Composed(self._partial.model, ids, arena, tuple(runs), awaited, asking)


class _Hearing:
    """Takes down the queries of the last ``asking`` tokens of the first forward, in a few layers."""

    def __init__(self, layers: Sequence[int], asking: int) -> None:
        self._layers, self._asking = frozenset(layers), asking
        self.heard: dict[int, Asked] = {}

    def listen(self, layer: int, queries: torch.Tensor, scaling: float | None) -> None:
        if layer in self._layers and layer not in self.heard:
            self.heard[layer] = Asked(queries[:, :, -self._asking :].clone(), scaling)


def _digest(ids: TokenIds) -> bytes:
    chain = TokenChain()
    chain.extend(ids)
    return chain.digest()


def _with_recomputed(plan: Plan, chosen: torch.Tensor) -> Plan:
    """The plan, knowing how many of each document's tokens are computed anew."""
    steps = []
    for step in plan.steps:
        if (m := step.moved) is not None:
            anew = int(((chosen >= m.at) & (chosen < m.at + m.tokens)).sum())
            step = replace(step, reused=m.tokens - anew, moved=replace(m, recomputed=anew))
        steps.append(step)
    return replace(plan, steps=tuple(steps))
