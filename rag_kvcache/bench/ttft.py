"""Time to first token and decode speed: uncached, warm, and the floor, in alternation.

uncached: transformers' ``generate`` with its default cache on the same ids.
warm: ``engine.generate`` on text, all documents cached, another question each time: tokenising, locating,
    hashing, copying included.
floor: one forward of the question's tokens on an arena that is already filled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from rag_kvcache import Engine
from rag_kvcache.bench.prompts import Prompt, make_prompts
from rag_kvcache.model.compat import cache_keyword

_QUESTION_TOKENS = 32
_DECODE_TOKENS = 32


@dataclass(frozen=True)
class Row:
    """Medians for one context length. Seconds; ``cold_s`` and ``decode_*`` only where measured."""

    context_tokens: int
    question_tokens: int
    uncached_s: float
    warm_s: float
    floor_s: float
    cold_s: float | None = None
    cold_uncached_s: float | None = None
    decode_s: float | None = None
    decode_uncached_s: float | None = None

    @property
    def sooner(self) -> float:
        """How many times sooner the first token comes warm than uncached."""
        return self.uncached_s / self.warm_s

    @property
    def over_floor(self) -> float:
        """Warm TTFT as a multiple of the floor."""
        return self.warm_s / self.floor_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, ratios included."""
        return {**asdict(self), "sooner": self.sooner, "over_floor": self.over_floor}


@dataclass(frozen=True)
class Bench:
    """Measures one engine. ``advance`` is called after each timed run, with what it was."""

    engine: Engine
    rounds: int
    advance: Callable[[str], None]

    def runs(self, context: int, *, cold: bool, decode: bool) -> int:
        """How many timed runs ``row`` makes."""
        return self.rounds * (3 + 2 * cold + 2 * decode)

    def row(self, context: int, *, cold: bool = False, decode: bool = False) -> Row:
        """Measure one context length; ``cold`` and ``decode`` measure these too."""
        prompts = make_prompts(self.engine, context, _QUESTION_TOKENS)
        for prompt in prompts[:2]:
            self.engine.generate(prompt.text, documents=prompt.documents, max_new_tokens=1)
        arms: dict[str, Callable[[Prompt], float]] = {
            "uncached": lambda p: self._plain(p, 1),
            "warm": lambda p: self._ours(p, 1)[0],
            "floor": self._floor_of(prompts[0]),
        }
        if decode:
            arms["decode"] = lambda p: self._per_token(*self._ours(p, _DECODE_TOKENS))
            arms["decode_uncached"] = self._plain_per_token
        times = _alternate(arms, prompts, self.rounds, self.advance)
        if cold:
            # After everything else: each of these runs empties the cache.
            cold_arms = {"cold": self._cold, "cold_uncached": lambda p: self._plain(p, 1)}
            times |= _alternate(cold_arms, prompts, self.rounds, self.advance)
        return Row(
            context_tokens=prompts[0].context_tokens,
            question_tokens=prompts[0].question_tokens,
            **{f"{name}_s": median(values) for name, values in times.items()},
        )

    def _plain(self, prompt: Prompt, tokens: int) -> float:
        """Seconds of transformers' own generate."""
        ids = self.engine.tokenizer(prompt.text, return_tensors="pt").input_ids.to(self.engine.model.device)
        started = time.perf_counter()
        self.engine.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
        return time.perf_counter() - started

    def _plain_per_token(self, prompt: Prompt) -> float:
        return (self._plain(prompt, 1 + _DECODE_TOKENS) - self._plain(prompt, 1)) / _DECODE_TOKENS

    def _ours(self, prompt: Prompt, tokens: int) -> tuple[float, float]:
        """(time to first token, seconds in all) of the engine."""
        generation = self.engine.generate(
            prompt.text,
            documents=prompt.documents,
            max_new_tokens=tokens,
            temperature=0,
            generate_kwargs={"min_new_tokens": tokens},
        )
        report = generation.report
        return report.ttft_s or report.total_s, report.total_s

    def _per_token(self, first: float, total: float) -> float:
        return (total - first) / (_DECODE_TOKENS - 1)

    def _cold(self, prompt: Prompt) -> float:
        """Seconds of a whole request with nothing cached, storing included."""
        self.engine.invalidate("all")
        return self._ours(prompt, 1)[1]

    def _floor_of(self, prompt: Prompt) -> Callable[[Prompt], float]:
        """Time of one forward of the question on a filled arena."""
        model, ids = self.engine.model, self.engine.tokenizer(prompt.text)["input_ids"]
        lm = self.engine._language_model
        arena = lm.new_arena(len(ids))
        with lm.lock:
            lm.prefill(torch.tensor(ids[: prompt.context_tokens]).numpy(), arena)
        question = torch.tensor([ids[prompt.context_tokens :]], device=model.device)

        def floor(_: Prompt) -> float:
            started = time.perf_counter()
            with torch.no_grad():
                model(input_ids=question, use_cache=True, logits_to_keep=1, **{cache_keyword(): arena.cache})
            seconds = time.perf_counter() - started
            arena.cache.crop(-question.shape[1])
            return seconds

        return floor


def _alternate(
    arms: dict[str, Callable[[Prompt], float]],
    prompts: tuple[Prompt, ...],
    rounds: int,
    advance: Callable[[str], None],
) -> dict[str, list[float]]:
    """Run the arms in turn, so that a drift of the machine meets them all alike."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for name, prompt in _turns(list(arms), prompts, rounds):
        times[name].append(arms[name](prompt))
        advance(name)
    return times


def _turns(names: list[str], prompts: tuple[Prompt, ...], rounds: int) -> Iterator[tuple[str, Prompt]]:
    for i in range(rounds):
        for name in names:
            yield name, prompts[i % len(prompts)]
