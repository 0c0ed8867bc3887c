"""A causal language model as the engine sees it: arenas, generation, identity."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from rag_kvcache.errors import ConfigurationError, RequestError, UnsupportedModelError
from rag_kvcache.keys import TokenIds
from rag_kvcache.model.arena import Arena, Geometry
from rag_kvcache.model.attention import Listener, Watched, faster_attention, watched_attention
from rag_kvcache.model.compat import cache_keyword
from rag_kvcache.model.fingerprint import model_fingerprint, weights_version
from rag_kvcache.model.guard import evaluating, lock_of, rope_restored
from rag_kvcache.model.moves import Moves, find_moves
from rag_kvcache.model.probe import probe
from rag_kvcache.model.support import context_window, exact_limit

_ARENA_STEP = 256  # tokens; so that arenas of similar requests fit each other
_ROOMY = 4  # how many times larger than needed a kept arena may be, or one long prompt's stays for ever

_CONTINUING_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_MODES = (
    *_CONTINUING_MODES,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
_SET_BY_ENGINE = {
    "max_new_tokens": "pass max_new_tokens= to the request",
    "max_length": "pass max_new_tokens= to the request",
    "stop_strings": "pass stop= to the request",
    "cache_implementation": "the engine brings the cache",
    "num_return_sequences": "one request gives one answer: make several",
    "return_dict_in_generate": "a Generation has the token ids",
}

OnToken = Callable[[int], bool]
"""Called with each new token id, from the generating thread; returns True to stop."""


@dataclass(frozen=True)
class Decoding:
    """How to choose tokens. None leaves a choice to the model's own generation config.

    temperature: 0 is greedy, more samples. extra: further ``GenerationConfig`` fields.
    """

    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class LanguageModel:
    """Wraps the user's model without changing it.

    Contract: hold ``lock`` around ``prepare``, ``generate`` and ``prefill``.

    Raises UnsupportedModelError when the model is no decoder-only generator.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "generate"):
            raise ConfigurationError(
                f"model must be a transformers model that can generate, not {type(model).__name__}; "
                "to load one by name use Engine.from_pretrained(name)"
            )
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError("encoder-decoder models are not supported: use a decoder-only model")
        self.model = model
        self.lock = lock_of(model)
        self._cache_keyword = cache_keyword()
        with self.lock:
            probed = probe(model)
            self._weights_version = weights_version(model)
            self.fingerprint = model_fingerprint(model)
        self.geometry: Geometry | None = probed.geometry
        self.support_reason = probed.reason
        self.exact_limit = exact_limit(model.config)
        self._spare: Arena | None = None
        self._moves: Moves | None = None

    @property
    def moves(self) -> Moves:
        """Whether and how its cached keys can be moved; tried out when first asked for. Hold ``lock``."""
        if self._moves is None:
            if self.geometry is None:
                self._moves = Moves(None, self.support_reason)
            else:
                self._moves = find_moves(self.model, self.geometry)
        return self._moves

    @property
    def full_layers(self) -> tuple[int, ...] | None:
        """The layers whose attention sees the whole prompt; None when all do."""
        types = getattr(self.model.config.get_text_config(decoder=True), "layer_types", None)
        return None if types is None else tuple(i for i, t in enumerate(types) if t == "full_attention")

    @property
    def name(self) -> str:
        """The hub id or folder it was loaded from."""
        return self.model.config._name_or_path or type(self.model).__name__

    @property
    def dtype(self) -> str:
        """Data type of the weights, e.g. "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    def context_window(self, tokenizer_limit: int) -> int:
        """Longest sequence in tokens."""
        return context_window(self.model.config, tokenizer_limit)

    def refresh_if_changed(self) -> None:
        """Take the fingerprint again when tensors were written in place or adapters switched."""
        if (version := weights_version(self.model)) != self._weights_version:
            self._weights_version = version
            self.refresh()

    def refresh(self) -> None:
        """Take the fingerprint again."""
        self.fingerprint = model_fingerprint(self.model)

    def generation_config(self, decoding: Decoding) -> GenerationConfig:
        """The model's own generation config with the request's choices on top.

        Raises RequestError for fields that transformers does not know or refuses.
        """
        taken = sorted(decoding.extra.keys() & _SET_BY_ENGINE.keys())
        if taken:
            raise RequestError("; ".join(f"generate_kwargs[{n!r}]: {_SET_BY_ENGINE[n]}" for n in taken))
        config = copy.deepcopy(self.model.generation_config)
        try:
            unknown = config.update(**decoding.extra)
        except ValueError as e:
            raise RequestError(f"wrong generation settings: {e}") from None
        if unknown:
            raise RequestError(f"unknown generation settings: {', '.join(sorted(unknown))}")
        if config.get_generation_mode() not in _MODES:
            raise RequestError(
                f"decoding by {config.get_generation_mode().value} is not supported: "
                f"use one of {', '.join(mode.value for mode in _MODES)}"
            )
        # A length limit of the model's own config would compete with max_new_tokens.
        config.max_length, config.max_new_tokens = None, decoding.max_new_tokens
        config.cache_implementation = None
        if decoding.temperature is not None:
            config.do_sample = decoding.temperature > 0
            config.temperature = decoding.temperature
        if decoding.top_p is not None and decoding.temperature != 0:
            config.do_sample, config.top_p = True, decoding.top_p
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        if config.pad_token_id is None and config.eos_token_id is not None:
            config.pad_token_id = _listed(config.eos_token_id)[0]
        if not all(isinstance(token, int) for token in _listed(config.eos_token_id)):
            raise RequestError(
                f"eos_token_id must be a token id or a list of them, not {config.eos_token_id!r}"
            )
        try:
            config.validate()
        except ValueError as e:
            raise RequestError(f"wrong generation settings: {e}") from None
        return config

    def can_continue(self, config: GenerationConfig) -> bool:
        """Whether this way of decoding accepts a cache that already holds a prefix.

        Beam search multiplies the cache, assisted decoding feeds the whole prompt again: neither does.
        """
        mode = config.get_generation_mode()
        return mode in _CONTINUING_MODES and config.use_cache is not False

    def eos_ids(self, config: GenerationConfig) -> frozenset[int]:
        """Ids that end a sequence."""
        return frozenset(_listed(config.eos_token_id))

    def new_arena(self, capacity: int) -> Arena:
        """An empty arena for at least ``capacity`` tokens, on the memory of a returned one if that fits."""
        if self.geometry is None:
            raise UnsupportedModelError(self.support_reason)
        spare, self._spare = self._spare, None
        if spare is not None and capacity <= spare.capacity <= _ROOMY * capacity + _ARENA_STEP:
            return Arena(self.geometry, spare.capacity, spare.memory)
        return Arena(self.geometry, -(-capacity // _ARENA_STEP) * _ARENA_STEP)

    def give_back(self, arena: Arena | None) -> None:
        """Keep a finished arena's memory for the next request; None lets go of what is kept."""
        self._spare = arena

    def generate(
        self,
        ids: TokenIds,
        arena: Arena | None,
        config: GenerationConfig,
        seed: int | None,
        on_token: OnToken,
        listen: Listener | None = None,
    ) -> None:
        """Run transformers' ``generate`` on the whole ``ids`` [tokens], continuing what ``arena`` holds.

        Without an arena it runs as transformers would by itself, with a cache of its own. An arena that
        awaits slots (``Arena.await_slots``) gets exactly these computed by the first forward; the last token
        must be one of them. ``listen`` hears every layer of every forward. Both need an attention that can
        be watched (``moves``).
        """
        device = self.model.device
        inputs = torch.from_numpy(np.ascontiguousarray(ids)).unsqueeze(0).to(device)
        kwargs: dict[str, Any] = {} if arena is None else {self._cache_keyword: arena.cache}
        tap = _Tap(on_token)
        rope = nullcontext() if self.exact_limit is None else rope_restored(self.model)
        attention = nullcontext() if arena is None else faster_attention(self.model)
        if arena is not None and (arena.awaited is not None or listen is not None):
            if arena.awaited is not None:
                kwargs |= self._scattered(inputs, arena.awaited)
            attention = watched_attention(self.model, Watched(lambda: arena.awaited, listen))
        with evaluating(self.model), rope, attention, _seeded(seed, device):
            try:
                out = self.model.generate(  # type: ignore[operator]
                    input_ids=inputs,
                    attention_mask=torch.ones_like(inputs),
                    generation_config=config,
                    stopping_criteria=StoppingCriteriaList([tap] if self.can_continue(config) else []),
                    **kwargs,
                )
            except (ValueError, TypeError) as e:
                if tap.tokens:
                    raise
                # Processors are made from the settings just before the first forward.
                raise RequestError(f"transformers refused these generation settings: {e}") from e
        if not tap.tokens:  # beams and the like know their tokens only at the end
            for token in out[0, inputs.shape[1] :].tolist():
                if on_token(token):
                    break

    def _scattered(self, inputs: torch.Tensor, awaited: torch.Tensor) -> dict[str, torch.Tensor]:
        """What makes ``generate`` run the ``awaited`` positions of ``inputs`` [1, tokens] first.

        ``generate`` runs the last tokens that its cache lacks: so the model gets embeddings and positions in
        an order that puts the awaited last, while logits processors see the ids as they stand.
        """
        awaited = awaited.to(inputs.device)
        held = torch.ones(inputs.shape[1], dtype=torch.bool, device=inputs.device)
        held[awaited] = False
        order = torch.cat([held.nonzero()[:, 0], awaited])
        with torch.no_grad():
            embedded = self.model.get_input_embeddings()(inputs[:, order])
        return {"inputs_embeds": embedded, "position_ids": order[None]}

    def look(
        self, ids: TokenIds, arena: Arena, slots: torch.Tensor, layers: Sequence[int]
    ) -> dict[int, tuple[torch.Tensor, float | None]]:
        """Run the model on the positions ``slots`` of ``ids`` only as far as the last of ``layers``.

        All other positions must be in ``arena``, whose KV of ``slots`` is overwritten up to there. Returns
        these layers' queries [1, heads, slots, dim] with the factor of their scores.
        """
        heard: dict[int, tuple[torch.Tensor, float | None]] = {}

        def listen(layer: int, queries: torch.Tensor, scaling: float | None) -> None:
            if layer in layers:
                heard[layer] = queries, scaling
            if layer == max(layers):
                raise _Enough

        with suppress(_Enough):
            self.forward(ids, arena, slots, listen)
        arena.await_slots(slots, len(ids))
        return heard

    def forward(
        self, ids: TokenIds, arena: Arena, slots: torch.Tensor, listen: Listener | None = None, keep: int = 1
    ) -> torch.Tensor:
        """Logits [keep, vocabulary] of the last of the positions ``slots`` of ``ids``, which are computed.

        All other positions must be in ``arena``.
        """
        arena.await_slots(slots, len(ids))
        where = slots.to(self.model.device)
        inputs = torch.from_numpy(np.ascontiguousarray(ids)).unsqueeze(0).to(self.model.device)
        watched = Watched(lambda: arena.awaited, listen)
        with evaluating(self.model), watched_attention(self.model, watched):
            out = self.model(
                inputs_embeds=self.model.get_input_embeddings()(inputs[:, where]),
                position_ids=where[None],
                attention_mask=torch.ones_like(inputs),
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_keyword: arena.cache},
            )
        return out.logits[0, -keep:]  # type: ignore[no-any-return]

    def prefill(self, ids: TokenIds, arena: Arena) -> None:
        """Fill ``arena`` with the KV of ``ids`` [tokens], of which it already holds a beginning.

        By way of ``generate``, so that positions and masks are made exactly as in a request.
        """
        greedy = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=None, pad_token_id=0)
        self.generate(ids, arena, greedy, None, lambda token: True)


class _Enough(Exception):
    """Ends a forward that has been far enough. No error of the model's, so never seen outside."""


def _listed(ids: Any) -> list[Any]:
    """A token id, a list of them, or None, as a list."""
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


class _Tap(StoppingCriteria):
    """Hands every new token to a callback, and stops when that says so.

    A stopping criterion rather than a streamer: transformers calls it once per step whatever the
    version, before the next forward, so a stop string ends the answer in the same step.
    """

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self.tokens = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.tokens += 1
        stop = self._on_token(int(input_ids[0, -1]))
        done = torch.full((input_ids.shape[0],), stop, dtype=torch.bool, device=input_ids.device)
        return torch.BoolTensor(done) if done.device.type == "cpu" else done  # type: ignore[return-value]


class _seeded:
    """Fixes torch's random numbers inside a block and puts the generator back as it was."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        cuda = [device] if device.type == "cuda" else []
        self._fork = None if seed is None else torch.random.fork_rng(devices=cuda)
        self._seed = seed

    def __enter__(self) -> None:
        if self._fork is not None and self._seed is not None:
            self._fork.__enter__()
            torch.manual_seed(self._seed)

    def __exit__(self, *exc: Any) -> None:
        if self._fork is not None:
            self._fork.__exit__(*exc)
