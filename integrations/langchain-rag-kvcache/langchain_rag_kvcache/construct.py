"""From the arguments of ``from_model_id`` to an engine and a model's fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from langchain_rag_kvcache.call import ALIASES
from langchain_rag_kvcache.pipeline_options import from_pipeline_options
from rag_kvcache.engine import Engine
from rag_kvcache.errors import ConfigurationError
from rag_kvcache.settings import Settings

SHARED = ("tenant", "reuse", "max_new_tokens")
"""Fields of the models that are also settings of the engine."""

_TASK = "text-generation"
# "default" is HuggingFacePipeline's word for transformers, "pipeline" is ChatHuggingFace's.
_BACKENDS = ("default", "pipeline")
_DTYPES = ("dtype", "torch_dtype")
_SOURCE = ("revision", "trust_remote_code", "gguf_file")
# What HuggingFacePipeline hands to the tokenizer too, of the options that say where to load from.
_HUB = ("token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")


def check_task(task: str | None, backend: str, batch_size: int) -> None:
    """Raise ConfigurationError for a kind of model that is not served."""
    if task not in (None, _TASK):
        raise ConfigurationError(
            f"task={task!r} is not supported: these models serve decoder-only models, task={_TASK!r}"
        )
    if backend not in _BACKENDS:
        raise ConfigurationError(
            f"backend={backend!r} is not supported: its KV cache cannot be reached. Use backend='default'"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigurationError(f"batch_size={batch_size!r} must be a number of prompts, 1 or more")


def to_device(device: int | str | None) -> str | None:
    """HuggingFacePipeline's numbers (-1 is the CPU, n the n-th GPU) as torch's names."""
    if device is None or isinstance(device, str):
        return device
    if isinstance(device, bool) or not isinstance(device, int) or device < -1:
        raise ConfigurationError(f"device={device!r} must be -1 (CPU), a GPU's number or a torch device")
    if device == -1:
        return "cpu"
    import torch

    if device >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device={device} does not exist, {torch.cuda.device_count()} GPUs do: use device=-1 for the CPU"
        )
    return f"cuda:{device}"


def load_engine(
    model_id: str,
    *,
    device: int | str | None,
    device_map: Any,
    dtype: Any,
    gguf_file: str | None,
    model_kwargs: Mapping[str, Any] | None,
    source: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Engine:
    """Load the model. ``source``: further arguments of ``Engine.from_pretrained``."""
    extra = dict(model_kwargs or {})
    arguments: dict[str, Any] = {"gguf_file": gguf_file, **source}
    for name in _SOURCE:
        if name in extra:
            _agree(name, arguments.get(name), extra[name])
            arguments[name] = extra.pop(name)
    for name in _DTYPES:
        if name in extra:
            _agree("dtype", dtype, extra[name])
            dtype = extra.pop(name)
    if "device_map" in extra:
        _agree("device_map", device_map, extra["device_map"])
        device_map = extra.pop("device_map")
    if device is not None and device_map is not None:
        raise ConfigurationError("device and device_map exclude each other: give one of them")
    hub = {name: extra[name] for name in _HUB if name in extra}
    arguments["tokenizer_kwargs"] = {**hub, **(arguments.get("tokenizer_kwargs") or {})} or None
    return Engine.from_pretrained(
        model_id,
        dtype="auto" if dtype is None else dtype,
        device=to_device(device),
        device_map=device_map,
        model_kwargs=extra or None,
        **{name: value for name, value in arguments.items() if value is not None},
        **settings,
    )


def split_options(
    options: Mapping[str, Any], pipeline_kwargs: Mapping[str, Any] | None, fields: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options as (fields of the LangChain model, settings of the engine).

    What is both, like the tenant, goes to both. Raises ConfigurationError for what is neither, and for
    options said twice with different values.
    """
    mapped = from_pipeline_options(pipeline_kwargs or {})
    own: dict[str, Any] = dict(mapped.fields)
    settings: dict[str, Any] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if name in fields:
            _agree(name, own.get(name), value)
            own[name] = value
        elif name in Settings.model_fields:
            settings[name] = value
        else:
            close = get_close_matches(name, [*fields, *Settings.model_fields], n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise ConfigurationError(
                f"unknown option {given}{hint or '. Options of transformers go into model_kwargs'}"
            )
    settings |= {name: own[name] for name in SHARED if own.get(name) is not None}
    if mapped.generate_kwargs:
        own["generate_kwargs"] = {**mapped.generate_kwargs, **(own.get("generate_kwargs") or {})}
    return own, settings


def check_generate_kwargs(generate_kwargs: Mapping[str, Any] | None, engine: Engine) -> None:
    """Raise ConfigurationError for options that transformers' ``generate`` would not know."""
    unknown = sorted((generate_kwargs or {}).keys() - vars(engine.model.generation_config).keys())
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)}: no option of transformers' GenerationConfig, so nothing would honour it. "
            "Leave it out"
        )


def _agree(name: str, one: Any, other: Any) -> None:
    if one is not None and one != other:
        raise ConfigurationError(f"{name} is given twice, as {one!r} and as {other!r}: give it once")
