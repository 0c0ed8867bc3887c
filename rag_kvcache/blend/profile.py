"""Repair the tokens to which an earlier, similar question paid most attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rag_kvcache.blend.composed import Composed
from rag_kvcache.blend.score import highest


@dataclass(frozen=True)
class Profile:
    """Costs nothing: the attention was taken down when that question was answered.

    share: of the moved tokens. Tokens of which nothing is known count as unimportant.
    """

    share: float
    name: str = "profile"

    def choose(self, prompt: Composed) -> torch.Tensor:
        """The highest share by the runs' profiles."""
        return highest(profiles(prompt), prompt.moved, self.share)


def profiles(prompt: Composed) -> torch.Tensor:
    """The runs' profiles side by side, float32 [tokens], 0 where nothing was moved or is known."""
    scores = torch.zeros(len(prompt.ids))
    for run in prompt.runs:
        if run.profile is not None:
            scores[run.at : run.at + run.tokens] = run.profile
    return scores
