"""Repair nothing: documents stay as they were computed, blind to those before them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rag_kvcache.blend.composed import Composed


@dataclass(frozen=True)
class Nothing:
    """What Prompt Cache (arXiv 2311.04934) and TurboRAG (arXiv 2410.07590) do."""

    name: str = "none"

    def choose(self, prompt: Composed) -> torch.Tensor:
        """No position."""
        return torch.empty(0, dtype=torch.int64)
