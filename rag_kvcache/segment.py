"""Values that describe a prompt: documents, and the segments a prompt is cut into.

A *segment* is a run of prompt tokens that is looked up, placed or prefilled as one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class Document:
    """A retrieved text that may stand in the prompt.

    text: the text as the retriever returned it.
    id: a label (a node id), shown in reports and accepted by ``engine.invalidate``. It never decides
        what is reused: the text does.
    metadata: free fields, kept for the caller's use, of any type: they take no part in comparing.
    """

    text: str
    id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)


class SegmentKind(StrEnum):
    """What a run of prompt tokens is."""

    STATIC = "static"  #: the part of the prompt that stays the same between questions
    GLUE = "glue"  #: text between documents: separators, titles, numbering
    DOCUMENT = "document"  #: a retrieved document
    HISTORY = "history"  #: earlier turns of a chat
    BLOCK = "block"  #: a run of tokens of a prompt about whose structure nothing is known
    QUESTION = "question"  #: what is asked now, never stored


class Level(StrEnum):
    """Where a segment's KV lives, and for how long."""

    STATIC = "L1"  #: static prompt: life of the service, own byte budget
    DOCUMENT = "L2"  #: documents, glue, history: LRU by bytes, TTL
    QUESTION = "L3"  #: the current question: never stored


class Outcome(StrEnum):
    """What happened to a segment in one request."""

    HIT = "hit"  #: its KV came from the cache, at the position it was computed for
    MOVED = "moved"  #: its KV came from the cache and was re-positioned
    BUILT = "built"  #: it was prefilled and its KV stored
    PREFILLED = "prefilled"  #: it was prefilled and not stored


class Reason(StrEnum):
    """Why a segment, or a whole request, has the outcome it has."""

    EXACT_PREFIX = "exact_prefix"  #: the same tokens behind the same tokens are cached
    EDGE_TOKENS = "edge_tokens"  #: cached but for edge tokens, which its neighbours changed
    LAST_TOKEN = "last_token"  #: all cached; the last token is run again to get its logits
    FIRST_SEEN = "first_seen"  #: never seen, or no longer cached
    OTHER_PREFIX = "other_prefix"  #: cached, but behind other text
    MOVED = "moved"  #: cached behind other text: re-positioned, the most important tokens computed anew
    BEHIND_MOVED = "behind_moved"  #: computed behind re-positioned KV: an approximation, so not stored
    NOT_ALLOWED = "not_allowed"  #: could have been moved, but the gate knows no similar earlier question
    NOT_MOVABLE = "not_movable"  #: cached behind other text, and this model's keys cannot be moved
    DRIFTING = "drifting"  #: could have been moved, but answers drifted too far lately
    QUESTION = "question"  #: a question is never stored
    QUESTION_FIRST = "question_first"  #: the question stands before the documents
    NO_DOCUMENT_FOUND = "no_document_found"  #: no known document stands in the prompt
    CONTROL_TOKENS = "control_tokens"  #: a text spells control tokens: only token blocks are reused
    LEVEL_OFF = "level_off"  #: this level is switched off in the settings
    TOO_LARGE = "too_large"  #: larger than the budget of its tier
    REUSE_OFF = "reuse_off"  #: reuse="off"
    UNSUPPORTED_FAMILY = "unsupported_family"  #: the model keeps state that cannot be cut by token
    LENGTH_DEPENDENT_ROPE = "length_dependent_rope"  #: positions of a prompt this long depend on its length
    DECODING_MODE = "decoding_mode"  #: beam search or assisted decoding, which cannot continue a cache
    NO_OFFSETS = "no_offsets"  #: a slow tokenizer, which cannot tell where a token stands in the text
    FOREIGN_ENTRY = "foreign_entry"  #: an entry under this key belongs to other tokens or another model
    INVALIDATED = "invalidated"  #: a document was invalidated while the request ran: nothing was stored
    STORE_FAULT = "store_fault"  #: a tier failed


@dataclass(frozen=True)
class Segment:
    """Prompt tokens ``[start, stop)``, in prompt order.

    text_digest: SHA-256 of the segment's text (of the whole document's text for a document), which
        together with the digest of all tokens before it names the segment in the cache.
    document: the document that stands here, for ``kind == DOCUMENT``.
    """

    kind: SegmentKind
    start: int
    stop: int
    text_digest: bytes
    document: Document | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start
