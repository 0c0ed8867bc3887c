"""Whether a model's cached keys can be moved and the gaps between them filled: tried out, not assumed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rag_kvcache.model.arena import Arena, Geometry
from rag_kvcache.model.attention import Watched, can_be_watched, watched_attention
from rag_kvcache.model.compat import cache_keyword
from rag_kvcache.model.guard import evaluating, rope_restored
from rag_kvcache.model.rope import find_rope
from rag_kvcache.model.rotation import Rotation

_TRIAL_TOKENS = 24
_GAPS = (5, 6, 11, 22, 23)  # apart, side by side, and at the end, where the next token comes from


@dataclass(frozen=True)
class Moves:
    """rotations: one per layer; None when KV must stay where it was computed, for ``reason``."""

    rotations: tuple[Rotation, ...] | None
    reason: str


def find_moves(model: PreTrainedModel, geometry: Geometry) -> Moves:
    """Try the model out. Four forwards of at most 24 tokens.

    Contract: hold the model's lock (``guard.lock_of``).
    """
    if not can_be_watched(model):
        implementation = model.config.get_text_config(decoder=True)._attn_implementation
        return Moves(None, f"its attention ({implementation}) cannot be told where tokens stand")
    rope = find_rope(model)
    if rope.rotations is None:
        return Moves(None, rope.reason)
    try:
        agrees = _fills_gaps(model, geometry)
    except Exception as e:  # whatever a model's own code raises here, it still serves exact reuse
        return Moves(None, f"it refused to fill gaps when tried: {type(e).__name__}: {e}")
    if not agrees:
        return Moves(None, "it fills gaps differently from a whole run")
    return Moves(rope.rotations, rope.reason)


def _fills_gaps(model: PreTrainedModel, geometry: Geometry) -> bool:
    """Whether a forward of the gaps alone gives the next token the logits of a whole run."""
    ids = torch.arange(1, _TRIAL_TOKENS + 1, device=model.device).unsqueeze(0)
    arena, everywhere = Arena(geometry, _TRIAL_TOKENS), torch.ones_like(ids)
    gaps, cache = torch.tensor(_GAPS, device=model.device), {cache_keyword(): arena.cache}
    with evaluating(model), rope_restored(model):
        expected = model(input_ids=ids, attention_mask=everywhere, use_cache=True, **cache).logits[0, -1]
        for layer in range(geometry.layers):
            for plane in arena.layer(layer):
                plane[:, gaps.to(plane.device)] = 0
        arena.await_slots(gaps, _TRIAL_TOKENS)
        with watched_attention(model, Watched(positions=lambda: arena.awaited)):
            got = model(
                inputs_embeds=model.get_input_embeddings()(ids[:, gaps]),
                position_ids=gaps[None],
                attention_mask=everywhere,
                use_cache=True,
                **cache,
            ).logits[0, -1]
    # Relative to the logits' own size: half precision models agree to about three digits.
    tolerance = 1e-3 if expected.dtype == torch.float32 else 5e-2
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1))
