"""How much each token of a prompt matters to a question, and the choice of the most important ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rag_kvcache.model.arena import Arena

_FIRST, _LAST = 0.4, 0.5  # of a model's depth: the layers whose attention predicts best what needs repair


def telling_layers(layers: int, full: Sequence[int] | None = None) -> tuple[int, ...]:
    """The layers to take attention from, by the model's depth; ``full``: those that see the whole prompt.

    12 to 14 of 30 measured better than all, or the last ones, on SmolLM2-135M.
    """
    wanted = range(int(_FIRST * layers), max(int(_FIRST * layers) + 1, int(_LAST * layers)))
    if full is None or not full:
        return tuple(wanted)
    inside = tuple(layer for layer in full if layer in wanted)
    # Where all of these are local, the nearest that is not.
    return inside or (min(full, key=lambda layer: abs(layer - wanted[0])),)


@dataclass(frozen=True)
class Asked:
    """One layer's queries [1, heads, asking, dim] of a prompt's last tokens, positions applied.

    scaling: of the scores; None is ``dim ** -0.5``.
    """

    queries: torch.Tensor
    scaling: float | None = None


def attention_paid(arena: Arena, asked: Mapping[int, Asked], tokens: int) -> torch.Tensor:
    """Attention that the last tokens of a prompt pay to each of its ``tokens``, float32 [tokens].

    Computed anew from a few layers' queries and the cached keys, one KV head at a time: no attention matrix
    of the whole prompt ever exists, and attention itself can stay the fast kind. The mean over layers, heads
    and queries: all tokens together get 1.

    asked: layer -> queries of the last tokens.
    """
    total = torch.zeros(tokens, dtype=torch.float32)
    count = 0
    for layer, asking_layer in asked.items():
        query, scaling = asking_layer.queries, asking_layer.scaling
        keys = arena.layer(layer)[0][:, :tokens]
        _, heads, asking, dim = query.shape
        groups = heads // keys.shape[0]
        ahead = torch.ones(asking, tokens, dtype=torch.bool, device=keys.device).triu(tokens - asking + 1)
        for head, key in enumerate(keys):
            folded = query[0, head * groups : (head + 1) * groups].to(key.device, torch.float32)
            scores = folded @ key.to(torch.float32).T * (dim**-0.5 if scaling is None else scaling)
            paid = scores.masked_fill_(ahead, float("-inf")).softmax(-1)
            total += paid.sum(dim=(0, 1)).cpu()
        count += heads * asking
    return total / max(1, count)


def highest(scores: torch.Tensor, among: torch.Tensor, share: float) -> torch.Tensor:
    """The best scored ``share`` of the positions ``among`` (ascending): ascending, int64 [chosen].

    Rounded up, so that any share above 0 repairs something. Ties go to the earlier position.
    """
    count = min(len(among), math.ceil(share * len(among) - 1e-9))
    best = scores[among].argsort(descending=True, stable=True)[:count]
    return among[best].sort().values
