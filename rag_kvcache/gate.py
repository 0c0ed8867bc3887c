"""The gate: may KV of documents that moved be reused for this question?

KV of a document that was computed behind other text is only an approximation of what this prompt would
give. The gate allows it where the question resembles one that was asked about the same documents before,
behind the same static prompt, by the same tenant, with the same model. It keeps digests and vectors of
earlier questions, never their text.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from cachetools import Cache, LRUCache, TTLCache

from rag_kvcache.errors import ConfigurationError, MissingExtraError, ModelNotFoundError
from rag_kvcache.keys import text_digest

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

Vector: TypeAlias = npt.NDArray[np.float32]
"""An embedding, shape [dimensions]."""

Embedder: TypeAlias = Callable[[str], Vector]
"""Embeds one question. It may raise; the gate then says ``Verdict.FAILED``."""

_EMBEDDINGS = 256  # embeddings kept, and at most so many questions waiting for theirs
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scope:
    """Whose questions may be compared: only those of the same scope.

    model: fingerprint of model, tokenizer and tenant.
    static: digest of the static prompt's tokens.
    """

    tenant: str
    model: bytes
    static: bytes


class Verdict(StrEnum):
    """Why reuse was allowed or not."""

    PASSED = "passed"  #: an earlier question about each of the documents is similar enough
    DIFFERENT = "different"  #: the similarity is not above the threshold
    UNKNOWN = "unknown"  #: some document has no earlier question, or there is no document
    NO_QUESTION = "no_question"  #: there is no question, or a blank one
    FAILED = "failed"  #: the question could not be embedded
    SLOW = "slow"  #: embedding it took longer than the timeout
    ALWAYS = "always"  #: every question passes
    NEVER = "never"  #: no question passes


@dataclass(frozen=True)
class Decision:
    """What the gate says about one question.

    similarity: cosine in [-1, 1] to the most similar earlier question, the smallest over the documents;
        None where nothing was compared.
    matched: per document, in order, the digest of its most similar earlier question; only with ``allow``.
    """

    allow: bool
    reason: Verdict
    similarity: float | None = None
    matched: tuple[bytes, ...] = ()


class Gate(Protocol):
    """Allows or refuses approximate reuse. Safe to call from many threads, and never raises on a question.

    Documents are given by their text digests.
    """

    def prepare(self, question: str | None) -> None:
        """Start what ``decide`` will wait for, and return at once."""

    def decide(self, question: str | None, documents: Sequence[bytes], scope: Scope) -> Decision:
        """Whether the documents' KV may be reused approximately for this question."""

    def learn(self, question: str | None, documents: Sequence[bytes], scope: Scope) -> bytes | None:
        """Remember the question for these documents. Its digest; None when nothing was remembered."""

    def forget(self, tenant: str, document: bytes | None = None) -> int:
        """Drop a tenant's records of one document, or all of them; returns how many."""

    def close(self) -> None:
        """Forget everything and learn nothing more. Waits for nothing; may be called again."""


class NeverGate:
    """A gate that stays shut: approximate reuse is switched off."""

    def prepare(self, question: str | None) -> None:
        """Nothing to start."""

    def decide(self, question: str | None, documents: Sequence[bytes], scope: Scope) -> Decision:
        """Always no."""
        return Decision(allow=False, reason=Verdict.NEVER)

    def learn(self, question: str | None, documents: Sequence[bytes], scope: Scope) -> bytes | None:
        """Remembers nothing."""
        return None

    def forget(self, tenant: str, document: bytes | None = None) -> int:
        """Nothing to drop."""
        return 0

    def close(self) -> None:
        """Nothing to close."""


class AlwaysGate:
    """A gate that stays open: whatever is asked, approximate reuse is accepted."""

    def prepare(self, question: str | None) -> None:
        """Nothing to start."""

    def decide(self, question: str | None, documents: Sequence[bytes], scope: Scope) -> Decision:
        """Always yes."""
        return Decision(allow=True, reason=Verdict.ALWAYS)

    def learn(self, question: str | None, documents: Sequence[bytes], scope: Scope) -> bytes | None:
        """Remembers nothing."""
        return None

    def forget(self, tenant: str, document: bytes | None = None) -> int:
        """Nothing to drop."""
        return 0

    def close(self) -> None:
        """Nothing to close."""


class SbertGate:
    """Compares sentence embeddings of questions by cosine.

    threshold: the similarity must be above it, for every document; in (0, 1].
    model: hub id or folder of a sentence-transformers model, loaded at construction onto the CPU.
    timeout_s: seconds ``decide`` and ``learn`` wait for an embedding. A late one is kept for next time.
    ttl_s: seconds a record lives after it was last learned.
    max_documents: documents (per scope) with records; the least recently used goes first.
    per_document: records of one document; the least recently learned or matched goes first.
    embed: used instead of ``model``. Called from one thread only.
    timer: clock in seconds for ``ttl_s``, injected by tests.
    """

    def __init__(
        self,
        threshold: float = 0.85,
        model: str = DEFAULT_MODEL,
        timeout_s: float = 1.0,
        ttl_s: float = 3600.0,
        max_documents: int = 4096,
        per_document: int = 16,
        embed: Embedder | None = None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        # Written so that NaN, for which every comparison is false, is refused too.
        if not 0 < threshold <= 1:
            raise ConfigurationError(f"threshold={threshold}: give a similarity above 0, at most 1")
        if not 0 < timeout_s <= threading.TIMEOUT_MAX:
            raise ConfigurationError(f"timeout_s={timeout_s}: give a finite number of seconds above 0")
        if not ttl_s > 0:
            raise ConfigurationError(f"ttl_s={ttl_s}: give a number of seconds above 0")
        for name, value in (("max_documents", max_documents), ("per_document", per_document)):
            if value < 1:
                raise ConfigurationError(f"{name}={value}: give a number of at least 1")
        self.counts: Counter[str] = Counter()
        """How many decisions came out which way, by ``Verdict``."""
        self._threshold = threshold
        self._timeout_s = timeout_s
        self._new_records: Callable[[], TTLCache[bytes, Vector]] = lambda: TTLCache(
            per_document, ttl_s, timer=timer
        )
        self._embed = _sentence_transformer(model) if embed is None else embed
        self._lock = threading.Lock()
        self._closed = False
        self._dimensions: int | None = None
        self._records: LRUCache[tuple[Scope, bytes], TTLCache[bytes, Vector]] = LRUCache(max_documents)
        self._embeddings: LRUCache[bytes, Vector] = LRUCache(_EMBEDDINGS)
        self._pending: dict[bytes, Future[Vector | None]] = {}
        self._tasks = _start_worker()
        # A gate that is dropped without close() must not leave its thread behind.
        self._stop_worker = weakref.finalize(self, self._tasks.put, None)
        self._stop_worker.atexit = False

    def prepare(self, question: str | None) -> None:
        """Start embedding the question, and return at once."""
        text = _normalised(question)
        if text:
            self._start(text_digest(text), text)

    def decide(self, question: str | None, documents: Sequence[bytes], scope: Scope) -> Decision:
        """Whether the documents' KV may be reused approximately for this question."""
        decision = self._decide(question, documents, scope)
        with self._lock:
            self.counts[decision.reason] += 1
        return decision

    def learn(self, question: str | None, documents: Sequence[bytes], scope: Scope) -> bytes | None:
        """Remember the question for these documents. Its digest; None when nothing was remembered."""
        text = _normalised(question)
        if not text or not documents:
            return None
        digest = text_digest(text)
        vector = self._vector(digest, text)
        if isinstance(vector, Verdict):
            return None
        with self._lock:
            if self._closed:
                return None
            for document in documents:
                records = self._live(scope, document)
                if records is None:
                    records = self._records[scope, document] = self._new_records()
                records.pop(digest, None)  # else a full cache would drop another record for this one
                records[digest] = vector
        return digest

    def forget(self, tenant: str, document: bytes | None = None) -> int:
        """Drop a tenant's records of one document, or all of them; returns how many."""
        with self._lock:
            gone = [key for key in self._records if key[0].tenant == tenant and document in (None, key[1])]
            if document is None:
                self._embeddings.clear()  # nobody knows whose questions they are of
            return sum(len(self._records.pop(key)) for key in gone)

    def close(self) -> None:
        """Forget everything and learn nothing more. Waits for nothing; may be called again."""
        with self._lock:
            self._closed = True
            waiting = list(self._pending.values())
            self._pending.clear()
            self._records.clear()
            self._embeddings.clear()
        for future in waiting:
            future.cancel()
        self._stop_worker()

    def _decide(self, question: str | None, documents: Sequence[bytes], scope: Scope) -> Decision:
        text = _normalised(question)
        if not text:
            return Decision(allow=False, reason=Verdict.NO_QUESTION)
        digest = text_digest(text)
        self._start(digest, text)  # also for unknown documents: learn will want it
        if not self._known(documents, scope):  # known without waiting
            return Decision(allow=False, reason=Verdict.UNKNOWN)
        vector = self._vector(digest, text)
        if isinstance(vector, Verdict):
            return Decision(allow=False, reason=vector)
        return self._compare(vector, documents, scope)

    def _known(self, documents: Sequence[bytes], scope: Scope) -> bool:
        with self._lock:
            return len(documents) > 0 and all(self._live(scope, d) is not None for d in documents)

    def _compare(self, vector: Vector, documents: Sequence[bytes], scope: Scope) -> Decision:
        smallest, matched = 1.0, []
        with self._lock:
            held = []
            for document in documents:
                records = self._live(scope, document)
                if records is None:  # expired or forgotten while this question was embedded
                    return Decision(allow=False, reason=Verdict.UNKNOWN)
                with records.timer:  # time stands still: nothing expires between look and use
                    # Past TTLCache's own lookup, which would make all that is visited recently used.
                    earlier = {key: Cache.__getitem__(records, key) for key in records}
                    if not earlier:  # expired since the line above
                        return Decision(allow=False, reason=Verdict.UNKNOWN)
                similarity, best = max((float(vector @ v), key) for key, v in earlier.items())
                smallest = min(smallest, similarity)
                matched.append(best)
                held.append(records)
            smallest = max(smallest, -1.0)  # rounding may lead out of [-1, 1]
            if not smallest > self._threshold:
                return Decision(allow=False, reason=Verdict.DIFFERENT, similarity=smallest)
            for records, best in zip(held, matched, strict=True):
                records.get(best)  # now the most recently used one
        return Decision(allow=True, reason=Verdict.PASSED, similarity=smallest, matched=tuple(matched))

    def _live(self, scope: Scope, document: bytes) -> TTLCache[bytes, Vector] | None:
        """The records of a document, now the most recently used one; None when there are none."""
        records = self._records.get((scope, document))
        if records is None:
            return None
        records.expire()
        if not len(records):
            del self._records[scope, document]
            return None
        return records

    def _vector(self, digest: bytes, text: str) -> Vector | Verdict:
        """The question's unit vector, or why there is none in time."""
        future = self._start(digest, text)
        if future is None:
            return Verdict.SLOW
        try:
            vector = future.result(self._timeout_s)
        except TimeoutError:
            return Verdict.SLOW
        except CancelledError:  # closed meanwhile
            return Verdict.FAILED
        return Verdict.FAILED if vector is None else vector

    def _start(self, digest: bytes, text: str) -> Future[Vector | None] | None:
        """Embed the question unless that is done or under way; None when too many are waiting."""
        future: Future[Vector | None] = Future()
        with self._lock:
            if (known := self._embeddings.get(digest)) is not None:
                future.set_result(known)
                return future
            if (pending := self._pending.get(digest)) is not None:
                return pending
            if self._closed:
                future.set_result(None)
                return future
            if len(self._pending) >= _EMBEDDINGS:  # a stuck embedder must not pile up questions
                return None
            self._pending[digest] = future
            self._tasks.put(lambda: self._run(digest, text, future))
        return future

    def _run(self, digest: bytes, text: str, future: Future[Vector | None]) -> None:
        """In the worker thread."""
        if not future.set_running_or_notify_cancel():
            return
        vector = self._embedded(text)
        with self._lock:
            if not self._closed:
                if vector is not None:
                    self._embeddings[digest] = vector
                self._pending.pop(digest, None)
        future.set_result(vector)

    def _embedded(self, text: str) -> Vector | None:
        try:
            vector = _unit(self._embed(text))
        except BaseException as e:  # whatever it is, the worker must live on
            # Its type alone: the message may quote the question.
            _log.warning("a question could not be embedded: %s", type(e).__name__)
            return None
        if vector is None or len(vector) != (self._dimensions or len(vector)):
            _log.warning("the embedding of a question is not usable: zero, not finite, or of another size")
            return None
        self._dimensions = len(vector)
        return vector


def _normalised(question: str | None) -> str:
    """The question without blanks at its ends, and single blanks in it."""
    return " ".join(question.split()) if question else ""


def _unit(embedding: Any) -> Vector | None:
    """The embedding with length 1; None when it has no direction."""
    wide = np.asarray(embedding, dtype=np.float64).ravel()
    norm = float(np.linalg.norm(wide))
    if not (0 < norm < math.inf):  # false for NaN, too
        return None
    return (wide / norm).astype(np.float32)


def _start_worker() -> SimpleQueue[Callable[[], None] | None]:
    """A thread that does what is put into the queue, one after the other, until it finds None there.

    A daemon, unlike the threads of ThreadPoolExecutor: those are waited for when the interpreter ends,
    for ever if an embedder hangs.
    """
    tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
    threading.Thread(target=_work, args=(tasks,), name="rag-kvcache-gate", daemon=True).start()
    return tasks


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds the question's text, and the gate


def _sentence_transformer(model: str) -> Embedder:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as e:
        raise MissingExtraError("sentence-transformers", "gate") from e
    try:
        loaded: Any = SentenceTransformer(model, device="cpu")
    except (OSError, ValueError) as e:
        raise ModelNotFoundError(
            f"no sentence-transformers model under {model!r}: give a hub id (and network access or a "
            f"filled hub cache) or a folder that has one"
        ) from e

    def embed(text: str) -> Vector:
        vector: Vector = loaded.encode(text, show_progress_bar=False)
        return vector

    return embed
