"""From the constructor's arguments, which are HuggingFaceLLM's, to an engine."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from rag_kvcache.errors import ConfigurationError, RagKVCacheError
from rag_kvcache.settings import Reuse

if TYPE_CHECKING:
    from rag_kvcache.engine import Engine

_log = logging.getLogger(__name__)

# What belongs to Engine.from_pretrained itself; everything else in model_kwargs goes to the model.
_ENGINE_LOADING = ("dtype", "gguf_file", "revision", "trust_remote_code")
# Arguments of transformers' generate that the engine sets itself.
_ENGINE_GENERATES = {
    "max_new_tokens": "pass max_new_tokens= to the LLM",
    "max_length": "pass max_new_tokens= to the LLM",
    "streamer": "call stream_complete or stream_chat",
    "stopping_criteria": "pass stopping_ids= to the LLM, or stop= to the call",
    "past_key_values": "the engine holds the cache",
    "cache": "the engine holds the cache",
    "cache_implementation": "the engine holds the cache",
    "return_dict_in_generate": "a response's raw field holds the token ids",
    "assistant_model": "speculative decoding is not supported",
}


def build_engine(
    *,
    engine: Engine | None,
    model: Any | None,
    tokenizer: Any | None,
    model_name: str | None,
    tokenizer_name: str | None,
    device_map: Any,
    model_kwargs: Mapping[str, Any],
    tokenizer_kwargs: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Engine:
    """The given engine, or one around the given model object, or around the named model."""
    if engine is not None:
        _refuse_beside_engine(
            model=model,
            tokenizer=tokenizer,
            tokenizer_name=tokenizer_name,
            model_kwargs=model_kwargs,
            tokenizer_kwargs=tokenizer_kwargs,
            settings=settings,
        )
        return engine
    from rag_kvcache.engine import Engine

    if model is not None:
        if model_kwargs:
            _log.warning("model_kwargs are unused: the model object passed as model= is already loaded")
        if tokenizer is None:
            name = tokenizer_name or model_name or getattr(model, "name_or_path", None)
            tokenizer = _load_tokenizer(name, tokenizer_kwargs)
        return Engine(model, tokenizer, **settings)
    if not model_name:
        raise ConfigurationError(
            'no model: pass model_name= (a hub id, a folder, or "demo"), or model= and tokenizer=, or engine='
        )
    loading = {("dtype" if k == "torch_dtype" else k): v for k, v in model_kwargs.items()}
    own = {name: loading.pop(name) for name in _ENGINE_LOADING if name in loading}
    return Engine.from_pretrained(
        model_name,
        device_map=_placeable(device_map),
        model_kwargs=loading,
        tokenizer=tokenizer if tokenizer is not None else tokenizer_name,
        tokenizer_kwargs=dict(tokenizer_kwargs),
        **own,
        **settings,
    )


def check_generate_kwargs(generate_kwargs: Mapping[str, Any], error: type[RagKVCacheError]) -> None:
    """Refuse what a request sets by other means."""
    for name in generate_kwargs:
        if name in _ENGINE_GENERATES:
            raise error(f"generate_kwargs[{name!r}] cannot be used: {_ENGINE_GENERATES[name]}")


def check_known(generate_kwargs: Mapping[str, Any], engine: Engine) -> None:
    """Refuse what is no field of transformers' GenerationConfig, or has a wrong value."""
    unknown = copy.deepcopy(engine.model.generation_config).update(**generate_kwargs)
    if unknown:
        raise ConfigurationError(
            f"generate_kwargs[{sorted(unknown)[0]!r}] is no field of transformers' GenerationConfig: "
            "leave it out, or check its spelling"
        )


def wrong_arguments(error: ValueError) -> ConfigurationError:
    """The error of a wrong constructor argument, with one line per fault."""
    if isinstance(error, ConfigurationError):
        return error
    if not isinstance(error, ValidationError):
        return ConfigurationError(f"wrong generate_kwargs: {error}")
    faults = (f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors())
    return ConfigurationError(f"wrong arguments: {'; '.join(faults)}")


def check_reuse(reuse: str | None) -> None:
    """Only known modes."""
    if reuse is not None and reuse not in get_args(Reuse):
        raise ConfigurationError(f"reuse must be one of {', '.join(get_args(Reuse))}, not {reuse!r}")


def window(asked: int | None, of_model: int) -> int:
    """The context window to tell LlamaIndex: what was asked for, as far as the model has it."""
    if asked is not None and asked > of_model:
        _log.warning("context_window=%d is larger than the model's, which is used: %d", asked, of_model)
    return of_model if asked is None else min(asked, of_model)


def check_outputs_to_remove(names: Sequence[str]) -> None:
    """The engine hands only token ids (and their mask) to the model: any other output is removed anyway."""
    if "input_ids" in names:
        raise ConfigurationError("tokenizer_outputs_to_remove must not name input_ids: nothing would be left")


def end_of_sequence(
    engine: Engine, stopping_ids: Sequence[int], generate_kwargs: Mapping[str, Any]
) -> list[int]:
    """The ids that end an answer: the model's own (or generate_kwargs') and the user's."""
    own = generate_kwargs.get("eos_token_id", engine.model.generation_config.eos_token_id)
    own = [] if own is None else [own] if isinstance(own, int) else list(own)
    return list(dict.fromkeys([*own, *stopping_ids]))


def _refuse_beside_engine(**given: Any) -> None:
    named = [name for name, value in given.items() if value is not None and value != {}]
    if named:
        raise ConfigurationError(
            f"engine= is already set up, so {', '.join(f'{n}=' for n in named)} cannot be honoured: "
            "pass them where the engine is made, or leave engine= out"
        )


def _load_tokenizer(name: str | None, tokenizer_kwargs: Mapping[str, Any]) -> Any:
    if not name:
        raise ConfigurationError(
            "model= was passed without its tokenizer: pass tokenizer= or tokenizer_name="
        )
    from rag_kvcache.model.load import load_tokenizer

    return load_tokenizer(name, **tokenizer_kwargs)


def _placeable(device_map: Any) -> Any:
    # transformers needs accelerate to place a model by a map. Without it the engine puts the whole model on
    # one device, which is what "auto" does where there is one.
    return None if device_map == "auto" and find_spec("accelerate") is None else device_map
