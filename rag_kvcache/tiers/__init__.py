"""Cache tiers: where entries live between requests."""

from rag_kvcache.tiers.entry import DocumentRef, Entry
from rag_kvcache.tiers.levels import Levels, level_of
from rag_kvcache.tiers.memory import MemoryTier
from rag_kvcache.tiers.tier import NullTier, Tier

__all__ = ["DocumentRef", "Entry", "Levels", "MemoryTier", "NullTier", "Tier", "level_of"]
