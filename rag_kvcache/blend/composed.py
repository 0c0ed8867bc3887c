"""A prompt whose moved documents are in place and not yet repaired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rag_kvcache.keys import TokenIds
from rag_kvcache.model.arena import Arena
from rag_kvcache.model.language_model import LanguageModel


@dataclass(frozen=True)
class MovedRun:
    """Tokens [at, at + tokens) of a prompt, whose KV was computed elsewhere and moved here.

    later: another document stands before them.
    profile: attention that an earlier question paid to each of them, float32 [tokens]; None: not known.
    """

    at: int
    tokens: int
    later: bool = True
    profile: torch.Tensor | None = None

    @property
    def slots(self) -> torch.Tensor:
        """Their positions, int64 [tokens]."""
        return torch.arange(self.at, self.at + self.tokens)


@dataclass(frozen=True)
class Composed:
    """What a repair method may look at. It leaves the moved KV in ``arena`` as it was.

    runs: in prompt order, at least one. awaited: the positions that are computed in any case, ascending,
    int64 [n]; all others are in the arena. asking: how many of the last tokens are the question.
    Contract: the model's lock is held.
    """

    model: LanguageModel
    ids: TokenIds
    arena: Arena
    runs: tuple[MovedRun, ...]
    awaited: torch.Tensor
    asking: int

    @property
    def moved(self) -> torch.Tensor:
        """All moved positions, ascending, int64 [moved]."""
        return torch.cat([run.slots for run in self.runs])


class Repair(Protocol):
    """Chooses the moved tokens whose KV is dropped and computed anew, together with the question."""

    @property
    def name(self) -> str:
        """As the settings and reports call it."""

    def choose(self, prompt: Composed) -> torch.Tensor:
        """Positions among ``prompt.moved``, ascending, int64 [chosen]."""
