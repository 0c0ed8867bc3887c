"""Tiny random-weight models of every supported family, and a tiny tokenizer, for fast exact tests."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB = 512
_TRAINING = [
    "The warranty of the kettle lasts two years. Return it within 30 days, with the receipt.",
    "You are a helpful shop assistant. Context:\n\nQuestion: how long? Answer: free above 50 euros.",
    "退货需要在三十天内完成。 保修期为两年。 foo bar x 123 4567",
]


@lru_cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens that merges across spaces like GPT-2's, with a ChatML template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_TRAINING * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<|im_start|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

# family -> (config class, what differs from _BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama_yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "llama_dynamic_ntk": (
        "LlamaConfig",
        {
            "max_position_embeddings": 400,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral_window8": ("MistralConfig", {"sliding_window": 8, "head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 4},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "phi3_longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.25, "hidden_size": 64}),
    "gptj": (
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 1024, "rotary_dim": 4, "n_inner": 64},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 1024, "n_inner": 64}),
    "falcon_alibi": ("FalconConfig", {"alibi": True, "new_decoder_architecture": False}),
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4}),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 8},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    ),
}


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of the family, fp32, eval mode. The same seed gives the same weights."""
    class_name, changes = FAMILIES[family]
    fields = _BASE | changes | overrides
    if family in ("gptj", "gpt2", "bloom"):
        own = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
        own |= {"num_key_value_heads", "max_position_embeddings"}
        fields = {
            k: v for k, v in fields.items() if k not in own or (family == "bloom" and k == "hidden_size")
        }
    config = getattr(transformers, class_name)(**fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # The default initialisation is so narrow that every position predicts the same token; a wider one
    # makes a wrong cache show.
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.2)
            elif "bias" in name:
                p.normal_(0.0, 0.1)
    model.eval()
    model.generation_config.eos_token_id = None
    return model
