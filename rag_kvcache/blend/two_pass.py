"""Repair the tokens to which this very question pays most attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rag_kvcache.blend.composed import Composed
from rag_kvcache.blend.score import Asked, attention_paid, highest, telling_layers


@dataclass(frozen=True)
class TwoPass:
    """For when there is no profile. share: of the moved tokens.

    Costs a forward of the question through the lower half of the model, on the cache as it was composed.
    """

    share: float
    name: str = "two_pass"

    def choose(self, prompt: Composed) -> torch.Tensor:
        """The highest share by the question's attention."""
        return highest(question_attention(prompt), prompt.moved, self.share)


def question_attention(prompt: Composed) -> torch.Tensor:
    """Attention of the question on the composed prompt, float32 [tokens]."""
    layers = telling_layers(prompt.arena.layers, prompt.model.full_layers)
    heard = prompt.model.look(prompt.ids, prompt.arena, prompt.awaited, layers)
    asked = {i: Asked(queries[:, :, -prompt.asking :], scaling) for i, (queries, scaling) in heard.items()}
    return attention_paid(prompt.arena, asked, len(prompt.ids))
