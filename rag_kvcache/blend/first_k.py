"""Repair the first tokens of each later document, on which attention sinks when it is computed alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rag_kvcache.blend.composed import Composed


@dataclass(frozen=True)
class FirstK:
    """After EPIC (arXiv 2410.15332). tokens: how many of each document that stands behind another."""

    tokens: int = 16
    name: str = "first_k"

    def choose(self, prompt: Composed) -> torch.Tensor:
        """The first positions of every later run."""
        chosen = [run.slots[: self.tokens] for run in prompt.runs if run.later]
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)
