"""How keys depend on their position, and turning them to another one.

Rotary position embeddings (RoFormer, arXiv 2104.09864) turn each pair of a key's dimensions by an angle
proportional to its position, so a key moves by turning it by the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """How one layer's keys depend on their position.

    frequencies: radians per position, one per pair of rotated dimensions; none when keys carry no position
        (ALiBi, NoPE). Dimensions beyond ``2 * len(frequencies)`` are not touched.
    interleaved: pairs are (0, 1), (2, 3), ... as in GPT-J; otherwise (0, n), (1, n + 1), ... as in Llama.
    """

    frequencies: tuple[float, ...] = ()
    interleaved: bool = False

    def turn_into(self, out: torch.Tensor, keys: torch.Tensor, distance: int) -> None:
        """Write ``keys`` [..., tokens, dim], moved ``distance`` positions on, into ``out`` of their shape.

        One pass: angles are made in float64 and applied in at least float32.
        ``out`` may not overlap ``keys``.
        """
        rotated = 2 * len(self.frequencies)
        out[..., rotated:].copy_(keys[..., rotated:])
        if not rotated or distance == 0:
            out[..., :rotated].copy_(keys[..., :rotated])
            return
        angles = torch.tensor(self.frequencies, dtype=torch.float64) * distance
        exact = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = angles.cos().to(keys.device, exact), angles.sin().to(keys.device, exact)
        (a, b), (to_a, to_b) = self._pairs(keys[..., :rotated]), self._pairs(out[..., :rotated])
        if exact == keys.dtype:
            torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-1)
            torch.mul(b, cos, out=to_b).addcmul_(a, sin)
        else:
            a, b = a.to(exact), b.to(exact)
            to_a.copy_(a * cos - b * sin)
            to_b.copy_(b * cos + a * sin)

    def sizes(self, keys: torch.Tensor) -> torch.Tensor:
        """Root mean square over [1, heads, tokens] of each pair's length and each untouched dimension."""
        rotated = 2 * len(self.frequencies)
        pairs = torch.hypot(*self._pairs(keys[..., :rotated]))
        return torch.cat([pairs, keys[..., rotated:]], dim=-1).square().mean(dim=(0, 1, 2)).sqrt()

    def _pairs(self, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first and of the second dimension of every pair."""
        if self.interleaved:
            return rotated[..., 0::2], rotated[..., 1::2]
        half = rotated.shape[-1] // 2
        return rotated[..., :half], rotated[..., half:]
