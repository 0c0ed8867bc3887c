"""Names of cache entries: SHA-256 over typed, length-framed fields.

Framing (a type byte, then an 8-byte length, then the bytes) keeps ``("org1", "23")`` and
``("org12", "3")`` apart, and the type byte keeps the text "1" apart from the number 1. Nothing here
depends on Python's ``hash()``, so two processes make the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT_VERSION = 1
"""Raised whenever the meaning of a key or of an entry changes; old entries then miss."""

TokenIds = npt.NDArray[np.int64]
"""Token ids, shape [tokens]."""


def framed_digest(*fields: str | bytes | int | TokenIds | None) -> bytes:
    """SHA-256 over the fields, each framed with its type and length. 32 bytes."""
    h = sha256()
    for field in fields:
        tag, payload = _typed(field)
        h.update(tag + len(payload).to_bytes(8, "little") + payload)
    return h.digest()


def _typed(field: str | bytes | int | TokenIds | None) -> tuple[bytes, bytes]:
    match field:
        case None:
            return b"n", b""
        case str():
            return b"s", field.encode("utf-8", "surrogatepass")
        case bytes():
            return b"b", field
        case bool():
            return b"o", bytes([field])
        case int():
            return b"i", str(field).encode()
        case _:
            return b"t", np.ascontiguousarray(field, dtype="<i8").tobytes()


def text_digest(text: str) -> bytes:
    """Names a document by its text."""
    return framed_digest("text", text)


def tokens_digest(ids: TokenIds) -> bytes:
    """Names a segment without a text of its own (glue, history, blocks) by its tokens."""
    return framed_digest("tokens", ids)


class TokenChain:
    """Running digest of all tokens before a position, independent of how they were cut."""

    def __init__(self) -> None:
        self._hash = sha256(b"chain")

    def extend(self, ids: TokenIds) -> None:
        """Append tokens."""
        self._hash.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())

    def digest(self) -> bytes:
        """Digest of the tokens so far, 32 bytes."""
        return self._hash.copy().digest()


@dataclass(frozen=True)
class KeyRing:
    """Makes keys for one model, tokenizer and tenant.

    model: fingerprint of config, weights, dtype, attention implementation, RoPE.
    tokenizer: fingerprint of the tokenizer and its chat template.
    tenant: None for entries shared by all tenants (``static_scope="global"``).
    """

    model: bytes
    tokenizer: bytes
    tenant: str | None

    @property
    def fingerprint(self) -> bytes:
        """What an entry must carry to be used with this model, tokenizer and tenant."""
        return framed_digest(FORMAT_VERSION, self.tenant, self.model, self.tokenizer)

    def key(self, prefix: bytes, text: bytes) -> bytes:
        """Name of the segment with digest ``text`` behind the tokens with digest ``prefix``."""
        return framed_digest(FORMAT_VERSION, self.tenant, self.model, self.tokenizer, prefix, text)


def common_prefix(a: Sequence[Any] | TokenIds, b: Sequence[Any] | TokenIds) -> int:
    """Number of leading tokens that two id sequences share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a)[:n] != np.asarray(b)[:n])
    return int(differs[0]) if len(differs) else n
