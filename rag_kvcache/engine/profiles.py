"""What earlier questions paid attention to: per document and question, one number per token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from cachetools import TTLCache

from rag_kvcache.engine.moving import overlap
from rag_kvcache.gate import Scope
from rag_kvcache.keys import TokenIds

_MAX_BYTES = 64 * 1024**2


@dataclass(frozen=True, eq=False)
class AttentionProfile:
    """Attention that a question paid to a document's tokens. ids, paid: [tokens]."""

    ids: TokenIds
    paid: npt.NDArray[np.float32]

    def on(self, ids: TokenIds) -> torch.Tensor:
        """Laid over ``ids``, float32 [tokens]; 0 where the document's edges were other tokens."""
        first, at, tokens = overlap(self.ids, ids)
        laid = np.zeros(len(ids), dtype=np.float32)
        laid[at : at + tokens] = self.paid[first : first + tokens]
        return torch.from_numpy(laid)


class Profiles:
    """Bounded by bytes, least recently used first; each expires ``ttl_s`` seconds after it was stored.

    Thread-safe. timer: clock in seconds, injected by tests.
    """

    def __init__(
        self, ttl_s: float, max_bytes: int = _MAX_BYTES, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = Lock()
        self._profiles: TTLCache[tuple[Scope, bytes, bytes], AttentionProfile] = TTLCache(
            max_bytes, ttl_s, timer=timer, getsizeof=lambda p: p.ids.nbytes + p.paid.nbytes
        )

    def put(self, scope: Scope, document: bytes, question: bytes, profile: AttentionProfile) -> None:
        """Keep a profile, unless it is larger than all of them may be."""
        with self._lock:
            if profile.ids.nbytes + profile.paid.nbytes <= self._profiles.maxsize:
                self._profiles[scope, document, question] = profile

    def get(self, scope: Scope, document: bytes, question: bytes) -> AttentionProfile | None:
        """The profile that this question left on this document, or None."""
        with self._lock:
            return self._profiles.get((scope, document, question))

    def forget(self, tenant: str, document: bytes | None = None) -> int:
        """Drop a tenant's profiles of one document, or all of them; how many."""
        with self._lock:
            gone = [k for k in self._profiles if k[0].tenant == tenant and document in (None, k[1])]
            for key in gone:
                del self._profiles[key]
            return len(gone)

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._profiles.clear()
