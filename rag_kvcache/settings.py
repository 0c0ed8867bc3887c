"""All settings of an engine: one frozen object, from keyword arguments or ``RAG_KVCACHE_*``."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ByteSize, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from rag_kvcache.errors import ConfigurationError

Reuse = Literal["exact", "gated", "always", "off"]
LevelName = Literal["static", "document"]
RepairName = Literal["auto", "none", "first_k", "deviation", "profile", "two_pass"]


class Settings(BaseSettings):
    """Settings of an engine.

    A keyword argument wins over the environment variable ``RAG_KVCACHE_<NAME>``, which wins over the
    default. Byte budgets take numbers or strings ("512MB", "2GiB").

    reuse: "exact" (default) reuses cached prefixes. "gated" also reuses documents behind other text, which
        makes answers approximations, where the gate knows a similar earlier question; "always" does so
        for every question. "off" runs plain transformers ``generate``.
    recompute_share: how much of each prompt's moved tokens is computed anew, 0 to 1; 1 is full prefill.
    repair: how these are chosen (``blend/``). "auto": by the similar question's attention, else by this
        one's ("two_pass").
    gate_model / gate_threshold / gate_timeout_s: the sentence-transformers model of the gate (hub id or
        folder), the cosine similarity that must be exceeded, and how long an embedding may take.
    tenant: the default tenant; a request may name another. Tenants never see each other's entries.
    max_bytes / max_entries / ttl_s: budget of L2 (documents, glue, history). LRU; entries expire
        ``ttl_s`` seconds after they were stored.
    static_max_bytes: budget of L1 (static prompt), which never expires.
    static_scope: "tenant", or "global" to share static prompts (never documents) between tenants.
    levels: which levels are used: ("static", "document") or ("static",).
    cache_history: store earlier turns of a chat.
    block_tokens: tokens per block where nothing is known of a prompt's structure, and of history.
    max_new_tokens: default for requests that do not say.
    known_documents: how many texts are remembered per tenant, to find them in prompts that come
        without documents.
    """

    model_config = SettingsConfigDict(
        env_prefix="RAG_KVCACHE_", frozen=True, extra="forbid", validate_default=True
    )

    reuse: Reuse = "exact"
    tenant: str = Field("default", min_length=1)
    max_bytes: ByteSize = Field(ByteSize(2 * 1024**3), gt=0)
    max_entries: int = Field(100_000, gt=0)
    ttl_s: float = Field(3600.0, gt=0)
    static_max_bytes: ByteSize = Field(ByteSize(256 * 1024**2), gt=0)
    static_scope: Literal["tenant", "global"] = "tenant"
    levels: tuple[LevelName, ...] = ("static", "document")
    cache_history: bool = True
    block_tokens: int = Field(64, ge=8)
    max_new_tokens: int = Field(256, gt=0)
    known_documents: int = Field(2048, ge=0)
    recompute_share: float = Field(0.15, ge=0, le=1)
    repair: RepairName = "auto"
    gate_model: str = Field("sentence-transformers/all-MiniLM-L6-v2", min_length=1)
    gate_threshold: float = Field(0.85, gt=0, le=1)
    gate_timeout_s: float = Field(1.0, gt=0, le=3600)

    @classmethod
    def make(cls, **values: Any) -> Self:
        """Build settings, raising ConfigurationError (not pydantic's error) with one line per fault."""
        try:
            return cls(**values)
        except ValidationError as e:
            faults = "; ".join(
                f"{'.'.join(map(str, err['loc'])) or 'settings'}={err['input']!r}: {err['msg']}"
                for err in e.errors()
            )
            raise ConfigurationError(f"wrong settings: {faults}") from None
        except ValueError as e:  # pydantic-settings' own: a variable that is no JSON where JSON is needed
            raise ConfigurationError(f"wrong settings: {e}; lists are JSON, as in '[\"static\"]'") from None
