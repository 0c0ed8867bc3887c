"""``pipeline_kwargs`` of a transformers pipeline, as arguments of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rag_kvcache.errors import ConfigurationError

_FIELDS = ("max_new_tokens", "temperature", "top_p", "seed")
_STOP = ("stop", "stop_strings", "stop_sequence")
# option -> (values that change nothing here, what to do instead of any other)
_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "return_full_text": ((False,), "an answer never repeats its prompt: join prompt and answer in the chain"),
    "return_text": ((True,), "answers are text"),
    "return_tensors": ((False,), "answers are text: read token counts from usage_metadata"),
    "clean_up_tokenization_spaces": ((False,), "clean the text in the chain"),
    "num_return_sequences": ((1,), "one prompt has one answer: use batch with as many copies of the prompt"),
    "use_cache": ((True,), "the cache is what this model is for: reuse='off' switches its reuse off"),
    "padding": ((False,), "prompts are not padded"),
    "truncation": ((False,), "a prompt is never cut: retrieve fewer documents, or trim in the chain"),
    "add_special_tokens": ((True,), "prompts get the tokenizer's own special tokens"),
    "handle_long_generation": ((), "a prompt is never cut: retrieve fewer documents"),
    "prefix": (("",), "put it in the prompt template"),
    "max_length": ((), "it counts the prompt too: say max_new_tokens"),
    "generation_config": ((), "give its fields one by one"),
    "streamer": ((), "use stream() or astream()"),
    "cache_implementation": ((), "the engine brings its own cache"),
    "past_key_values": ((), "the engine brings its own cache"),
    "return_dict_in_generate": ((False,), "answers are text"),
    "device": ((), "give it to from_model_id"),
    "device_map": ((), "give it to from_model_id"),
    "dtype": ((), "give it to from_model_id"),
    "torch_dtype": ((), "give dtype= to from_model_id"),
    "model_kwargs": ((), "give it to from_model_id"),
    "trust_remote_code": ((), "give it to from_model_id"),
    "revision": ((), "give it to from_model_id"),
}
_NO_EFFECT = ("batch_size",)
_SHAPES_SAMPLING = ("top_p", "top_k", "min_p", "typical_p")


@dataclass(frozen=True)
class PipelineOptions:
    """``pipeline_kwargs``, sorted: fields of the models, and options for transformers' ``generate``."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)


def from_pipeline_options(options: Mapping[str, Any]) -> PipelineOptions:
    """Sort ``pipeline_kwargs``. Raises ConfigurationError for one that cannot be honoured."""
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"pipeline_kwargs must be a dict, not {type(options).__name__}")
    fields: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in _NO_EFFECT:
            continue
        if name in _ONLY:
            harmless, instead = _ONLY[name]
            if value not in harmless:
                raise ConfigurationError(f"pipeline_kwargs {name}={value!r} cannot be honoured: {instead}")
        elif name in _FIELDS:
            fields[name] = value
        elif name in _STOP:
            fields["stop"] = [value] if isinstance(value, str) else list(value)
        else:
            rest[name] = value
    return PipelineOptions(*_sampling(fields, rest))


def _sampling(fields: dict[str, Any], rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """transformers decides by do_sample, the engine by temperature: 0 is greedy."""
    if rest.get("do_sample") is False:
        # Greedy search ignores what shapes sampling; transformers only warns.
        fields = {name: value for name, value in fields.items() if name not in _SHAPES_SAMPLING}
        rest = {name: value for name, value in rest.items() if name not in ("do_sample", *_SHAPES_SAMPLING)}
        return {**fields, "temperature": 0.0}, rest
    if rest.get("do_sample") and fields.get("temperature") == 0:
        raise ConfigurationError(
            "pipeline_kwargs do_sample=True contradicts temperature=0: choose do_sample=False, "
            "or a temperature above 0"
        )
    return fields, rest
