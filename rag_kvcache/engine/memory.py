"""What an engine remembers between requests, per tenant: entries, documents, static prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import RLock

from cachetools import LRUCache

from rag_kvcache.engine.plan import Plan, Planner, Step
from rag_kvcache.keys import KeyRing, TokenChain, TokenIds, text_digest, tokens_digest
from rag_kvcache.model.arena import Arena
from rag_kvcache.prompt.cut import Layout
from rag_kvcache.prompt.locate import Locator
from rag_kvcache.prompt.registry import KnownDocuments
from rag_kvcache.prompt.static import StaticPrefixes
from rag_kvcache.segment import Document, Reason, SegmentKind
from rag_kvcache.settings import Settings
from rag_kvcache.tiers import Entry, Levels, MemoryTier, NullTier

_MAX_TENANTS = 1024  # tenants whose static prompts are remembered; those of an evicted one are learnt anew


class Memory:
    """The engine's state, thread-safe.

    Contract: what was invalidated while a request ran is not stored by that request.

    timer: clock in seconds for expiry, injected by tests.
    """

    def __init__(
        self, settings: Settings, tokenizer_fingerprint: bytes, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer_fingerprint
        self.documents = KnownDocuments(settings.known_documents)
        self._lock = RLock()  # around what must not happen between an invalidation and a store
        self._epoch = 0
        self._closed = False
        self._statics: LRUCache[str | None, StaticPrefixes] = LRUCache(_MAX_TENANTS)
        on = settings.levels
        self.levels = Levels(
            static=MemoryTier(settings.static_max_bytes, timer=timer) if "static" in on else NullTier(),
            document=MemoryTier(
                settings.max_bytes, max_entries=settings.max_entries, ttl_s=settings.ttl_s, timer=timer
            )
            if "document" in on
            else NullTier(),
        )

    def planner(self, model_fingerprint: bytes, tenant: str, bytes_per_token: int) -> Planner:
        """Plans over this memory for one tenant and the model as it is now."""
        return Planner(
            levels=self.levels,
            keys=lambda kind: self._keyring(model_fingerprint, tenant, kind),
            bytes_per_token=bytes_per_token,
            cache_history=self._settings.cache_history,
            epoch=self._epoch,
        )

    def locator(self, documents: Sequence[Document], tenant: str) -> Locator:
        """Searches for the given documents, or without any for all the tenant is known to have."""
        if documents:
            self.documents.remember(documents, tenant)
            return Locator(documents)
        return self.documents.locator(tenant)

    def static_cuts(self, planner: Planner, ids: TokenIds, layout: Layout, tenant: str) -> tuple[int, ...]:
        """Lengths of the prompt's static beginnings, after learning from this prompt too."""
        if "static" not in self._settings.levels:
            return ()
        prefix = self._static_of(tenant).observe(ids, layout.head, tokens_digest(ids[layout.tail :]))
        for retired in prefix.retired:
            key = planner.keys(SegmentKind.STATIC).key(TokenChain().digest(), tokens_digest(retired))
            self.levels.discard(partial(_is_static, key))
        return prefix.cuts

    def name_static(self, ids: TokenIds, tenant: str) -> None:
        """The user says that prompts begin with these tokens."""
        if len(ids):
            self._static_of(tenant).name(ids)

    def store(self, plan: Plan, planner: Planner, ids: TokenIds, arena: Arena, tenant: str) -> Plan:
        """Keep what was built. Last segments first: so the least recently used end of a chain goes first."""
        with self._lock:
            if self._closed or planner.epoch != self._epoch:
                return plan.unstored(Reason.INVALIDATED)
            done = [self._stored(step, planner, ids, arena, tenant) for step in reversed(plan.steps)]
        return replace(plan, steps=tuple(reversed(done)))

    def invalidate(self, target: Document | str | None, tenant: str) -> int:
        """Drop what holds, or was computed behind, a document (by text or id); None drops all. How many."""
        with self._lock:
            self._epoch += 1
            if target is None:
                self.documents.forget(tenant)
                self._statics.pop(self._scope(tenant), None)
                return self.levels.discard(lambda e: e.tenant in (tenant, self._scope(tenant)))
            return self._drop_document(target, tenant)

    def text_digests(self, target: Document | str, tenant: str) -> set[bytes]:
        """The texts that a document, a text or an id stands for, as far as they are known, by digest."""
        if isinstance(target, Document):
            return {text_digest(target.text)} | self._labelled(target.id, tenant)
        return {text_digest(target)} | self._labelled(target, tenant)

    def _labelled(self, label: str | None, tenant: str) -> set[bytes]:
        found: set[bytes] = set()
        if label is not None:
            found.update(text_digest(text) for text in self.documents.labelled(label, tenant))
            self.levels.discard(lambda e: _note_labelled(e, label, tenant, found))
        return found

    def _drop_document(self, target: Document | str, tenant: str) -> int:
        text, label = (target.text, target.id) if isinstance(target, Document) else (target, target)
        self.documents.forget(tenant, text=text, label=label)
        digest = text_digest(text)

        def holds(entry: Entry) -> bool:
            marks = entry.documents
            return entry.tenant == tenant and any(
                d.text_digest == digest or (label is not None and d.label == label) for d in marks
            )

        return self.levels.discard(holds)

    def close(self) -> None:
        """Forget everything and store nothing any more."""
        with self._lock:
            self._closed = True
            self.levels.discard(lambda entry: True)

    def _stored(self, step: Step, planner: Planner, ids: TokenIds, arena: Arena, tenant: str) -> Step:
        s = step.segment
        if step.entry is not None:
            self.levels.find(s.kind, step.key)  # touched again, in this order
        if not step.store:
            return step
        try:
            kept = self.levels.keep(self._entry(step, planner, ids, arena, tenant))
        except Exception as e:  # no memory for the copy: the answer is complete, only the cache is poorer
            self.levels.fault("copy", e)
            kept = False
        return step if kept else replace(step, store=False, reason=Reason.STORE_FAULT)

    def _entry(self, step: Step, planner: Planner, ids: TokenIds, arena: Arena, tenant: str) -> Entry:
        """What a built segment is stored as."""
        s = step.segment
        return Entry(
            key=step.key,
            fingerprint=planner.keys(s.kind).fingerprint,
            tenant=self._scope(tenant) if s.kind == SegmentKind.STATIC else tenant,
            prefix_digest=step.prefix_digest,
            text_digest=s.text_digest,
            kind=s.kind,
            start=s.start,
            token_ids=ids[s.start : s.stop].copy(),
            planes=arena.take(s.start, s.stop),
            documents=step.documents,
        )

    def _keyring(self, model_fingerprint: bytes, tenant: str, kind: SegmentKind) -> KeyRing:
        owner = self._scope(tenant) if kind == SegmentKind.STATIC else tenant
        return KeyRing(model_fingerprint, self._tokenizer, owner)

    def _scope(self, tenant: str) -> str | None:
        """Who owns a tenant's static prompts: None when all tenants share them."""
        return None if self._settings.static_scope == "global" else tenant

    def _static_of(self, tenant: str) -> StaticPrefixes:
        with self._lock:
            return self._statics.setdefault(self._scope(tenant), StaticPrefixes())


def _note_labelled(entry: Entry, label: str, tenant: str, into: set[bytes]) -> bool:
    """Notes the texts of this label that an entry holds or stands behind, and lets it stay."""
    if entry.tenant == tenant:
        into.update(d.text_digest for d in entry.documents if d.label == label)
    return False


def _is_static(key: bytes, entry: Entry) -> bool:
    return entry.key == key and entry.kind == SegmentKind.STATIC
