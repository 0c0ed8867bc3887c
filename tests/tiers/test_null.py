"""The tier of a level that is switched off keeps nothing."""

from __future__ import annotations

from rag_kvcache.tiers import NullTier
from tests.tiers.contract import TierContract


class TestNullTier(TierContract):
    keeps = False

    def make(self, tokens: int) -> NullTier:
        return NullTier()
