"""What identifies a model and a tokenizer: two that differ never share a cache entry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rag_kvcache.keys import framed_digest

_SAMPLES = 64  # elements read from each tensor
_ADAPTER_STATE = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "architectures")


def model_fingerprint(model: PreTrainedModel) -> bytes:
    """Digest of config (RoPE included), dtype, attention implementation, adapters and weights. 32 bytes.

    Weights are identified by 64 evenly strided elements of every tensor, the same in every process. A
    change of other elements alone is not seen; training steps, adapters and loaded checkpoints change
    practically all of them.
    """
    config = model.config.to_dict()
    for name in _VOLATILE:
        config.pop(name, None)
    return framed_digest(
        type(model).__name__,
        json.dumps(config, sort_keys=True, default=str),
        str(getattr(model.config, "_attn_implementation", None)),
        _adapters(model),
        *_samples(model),
    )


def weights_version(model: PreTrainedModel) -> tuple[Any, ...]:
    """A cheap value that changes when tensors are replaced or written in place, or adapters switched.

    It sees optimizer steps, ``load_state_dict``, ``.to(...)`` and ``set_adapter``. It does not see writes
    through ``.data``, from outside torch, or to tensors made in inference mode: ``Engine.refresh()`` is for
    these.
    """
    # Not hashed: the tuple is compared as a whole.
    return (_adapters(model), tuple((t.data_ptr(), _writes(t)) for _, t in _tensors(model)))


def _writes(tensor: torch.Tensor) -> int:
    """How often it was written in place; tensors made in inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers. The others follow from the config, and RoPE rewrites its own."""
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", tensor


def _samples(model: nn.Module) -> Iterator[str | bytes]:
    for name, tensor in sorted(_tensors(model), key=lambda pair: pair[0]):
        flat = tensor.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLES)
        picked = flat[::stride][:_SAMPLES].contiguous().cpu()
        # Bytes as stored: casting would make two dtypes look alike.
        yield f"{name}:{tuple(tensor.shape)}:{tensor.dtype}"
        yield picked.view(torch.uint8).numpy().tobytes() if picked.numel() else b""


def _adapters(model: nn.Module) -> str:
    """Which adapters act, and with which strength (peft's attributes, if there are any)."""
    if not hasattr(model, "peft_config") and not getattr(model, "_hf_peft_config_loaded", False):
        return ""
    acting = [
        (name, *(getattr(m, field, None) for field in _ADAPTER_STATE))
        for name, m in model.named_modules()
        if hasattr(m, "merged_adapters")
    ]
    return json.dumps(acting, sort_keys=True, default=str)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Digest of vocabulary, merges, normaliser, special tokens and chat template. 32 bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inside = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:
        inside |= {"truncation": None, "padding": None}  # left behind by whatever was called last
    added = {str(k): str(v) for k, v in tokenizer.added_tokens_decoder.items()}
    return framed_digest(
        type(tokenizer).__name__,
        json.dumps(inside, sort_keys=True),
        json.dumps(added, sort_keys=True),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        json.dumps(tokenizer.chat_template, sort_keys=True, default=str),
    )
