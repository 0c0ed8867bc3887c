"""Repair the tokens whose values at an early layer differ most from a fresh computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rag_kvcache.blend.composed import Composed
from rag_kvcache.blend.score import highest

_LAYER = 1  # the first whose values depend on what stands before a token


@dataclass(frozen=True)
class Deviation:
    """After CacheBlend (arXiv 2405.16444). share: of the moved tokens.

    Costs a forward of the first two layers over everything from the first moved token on.
    """

    share: float
    name: str = "deviation"

    def choose(self, prompt: Composed) -> torch.Tensor:
        """The highest share by squared distance of the values at layer 1, summed over heads."""
        distance = value_deviation(prompt)
        return highest(distance, prompt.moved, self.share)


def value_deviation(prompt: Composed) -> torch.Tensor:
    """Squared distance of each token's cached values at layer 1 from fresh ones, float32 [tokens].

    0 where nothing was moved. The cached KV is put back afterwards.
    """
    tokens, first = len(prompt.ids), prompt.runs[0].at
    layer = min(_LAYER, prompt.arena.layers - 1)
    slots = torch.cat([prompt.moved, prompt.awaited]).unique(sorted=True)
    before = [tuple(t[:, first:tokens].clone() for t in prompt.arena.layer(i)) for i in range(layer + 1)]
    prompt.model.look(prompt.ids, prompt.arena, slots, (layer,))
    fresh = prompt.arena.layer(layer)[1][:, first:tokens]
    differs = (fresh.float() - before[layer][1].float()).square().sum(dim=(0, 2)).cpu()
    for index, kept in enumerate(before):
        for mine, stored in zip(prompt.arena.layer(index), kept, strict=True):
            mine[:, first:tokens] = stored
    distance = torch.zeros(tokens)
    distance[prompt.moved] = differs[prompt.moved - first]
    return distance
