"""What each model family allows, and why.

*exact*: a cached prefix continues to the same logits as an uncached run. A family not listed here is
tried out at construction (``probe.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class FamilySupport:
    """One family's row.

    exact: cached prefixes may be used. moves: how keys could be re-positioned (RoPE layout), or why not.
    """

    exact: bool
    moves: str
    reason: str


_ROPE_HALF = "RoPE, half-split"
FAMILIES: dict[str, FamilySupport] = {
    "llama": FamilySupport(True, _ROPE_HALF, "full attention"),
    "qwen2": FamilySupport(True, _ROPE_HALF, "full attention"),
    "qwen3": FamilySupport(True, _ROPE_HALF, "full attention, normed keys"),
    "qwen3_moe": FamilySupport(True, _ROPE_HALF, "experts keep no state between tokens"),
    "mistral": FamilySupport(True, _ROPE_HALF, "sliding window by mask, KV kept at full length"),
    "mixtral": FamilySupport(True, _ROPE_HALF, "experts keep no state between tokens"),
    "gemma2": FamilySupport(True, _ROPE_HALF, "local layers by mask, KV kept at full length"),
    "gemma3_text": FamilySupport(True, _ROPE_HALF + ", base per layer type", "local layers by mask"),
    "phi3": FamilySupport(True, _ROPE_HALF, "longrope: exact below its length boundary"),
    "gpt_neox": FamilySupport(True, _ROPE_HALF + ", partial", "full attention"),
    "gptj": FamilySupport(True, "RoPE, interleaved, partial", "full attention"),
    "gpt2": FamilySupport(True, "learned positions: cannot be moved", "full attention"),
    "falcon": FamilySupport(True, "ALiBi or RoPE by config", "full attention"),
    "bloom": FamilySupport(True, "ALiBi: nothing to rotate", "full attention"),
    "mamba": FamilySupport(False, "no keys", "recurrent state cannot be cut by token"),
    "mamba2": FamilySupport(False, "no keys", "recurrent state cannot be cut by token"),
    "jamba": FamilySupport(False, "no keys in Mamba layers", "recurrent state cannot be cut by token"),
    "rwkv": FamilySupport(False, "no keys", "recurrent state cannot be cut by token"),
    "recurrent_gemma": FamilySupport(False, "no keys in RG-LRU layers", "recurrent state"),
    "qwen3_next": FamilySupport(False, "no keys in linear layers", "recurrent state cannot be cut by token"),
}

_LENGTH_DEPENDENT = ("dynamic", "longrope")


def exact_limit(config: PretrainedConfig) -> int | None:
    """Prompts of this many tokens or more cannot reuse a cached prefix; None when there is no such limit.

    Dynamic NTK and longrope choose their frequencies by the length of the whole sequence, so a prefix
    computed in a short prompt has other keys than the same prefix in a long one. Below the original
    length both use the original frequencies. Strictly below: at exactly that length dynamic NTK keeps
    the frequencies a longer sequence left behind.
    """
    text = config.get_text_config(decoder=True)
    limits = [
        int(rope.get("original_max_position_embeddings") or _original_length(text))
        for rope in _rope_parameters(text)
        if rope.get("rope_type", rope.get("type")) in _LENGTH_DEPENDENT
    ]
    return min(limits, default=None)


def context_window(config: PretrainedConfig, tokenizer_limit: int) -> int:
    """Longest sequence in tokens the model takes. Models without a limit of their own use the tokenizer's."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        window = getattr(text, name, None)
        if isinstance(window, int) and window > 0:
            stretch = [
                r.get("factor") or 1.0 for r in _rope_parameters(text) if r.get("rope_type") == "dynamic"
            ]
            return int(window * max([1.0, *stretch]))
    # transformers writes 1e30 into a tokenizer without a limit.
    return min(tokenizer_limit, 1 << 20)


def _original_length(text: PretrainedConfig) -> int:
    return int(getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings)


def _rope_parameters(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE settings, one per layer type where a model has several."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
