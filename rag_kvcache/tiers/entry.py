"""One cached segment: its KV, and all that is needed to decide whether it may be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_kvcache.keys import TokenIds, common_prefix
from rag_kvcache.segment import SegmentKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DocumentRef:
    """A document whose text an entry holds or was computed behind."""

    text_digest: bytes
    label: str | None


@dataclass(frozen=True, eq=False)
class Entry:
    """The KV of the tokens ``token_ids`` at positions ``start ..``, computed behind one exact prefix.

    key: the entry's name (``KeyRing.key``).
    fingerprint: of model, tokenizer and tenant (``KeyRing.fingerprint``).
    prefix_digest: digest of all tokens before this segment (``TokenChain.digest``).
    planes: KV tensors, each [slots, kv_heads, tokens, head_dim]; see ``model.arena.Geometry``. Never
        mutated after the entry is made, and sharing storage with nothing else.
    documents: this document and those before it in the chain: the entry holds traces of all of them,
        so it goes when one of them is invalidated.
    """

    key: bytes
    fingerprint: bytes
    tenant: str | None
    prefix_digest: bytes
    text_digest: bytes
    kind: SegmentKind
    start: int
    token_ids: TokenIds
    planes: tuple[torch.Tensor, ...]
    documents: tuple[DocumentRef, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of KV held alive by this entry, by storage rather than by view."""
        return sum(p.untyped_storage().nbytes() for p in self.planes)

    def usable_tokens(self, fingerprint: bytes, prefix_digest: bytes, start: int, ids: TokenIds) -> int:
        """How many leading tokens of ``ids`` at ``start`` this entry holds the right KV for.

        0 when the entry is foreign: the key alone is never trusted.
        """
        belongs = (self.fingerprint, self.prefix_digest, self.start) == (fingerprint, prefix_digest, start)
        return common_prefix(self.token_ids, ids) if belongs else 0
