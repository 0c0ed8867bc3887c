"""A request, from prompt to answer, as one straight line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

from rag_kvcache.engine.memory import Memory
from rag_kvcache.engine.partial import Attempt, Partial
from rag_kvcache.engine.plan import Plan, Planner, prefill_all
from rag_kvcache.engine.request import Request
from rag_kvcache.engine.watch import Watch
from rag_kvcache.engine.worker import Emit
from rag_kvcache.errors import PromptTooLongError
from rag_kvcache.model.arena import Arena
from rag_kvcache.model.language_model import Decoding, LanguageModel
from rag_kvcache.model.tokenizer import PromptTokenizer
from rag_kvcache.prompt.locate import Locator
from rag_kvcache.prompt.read import ReadPrompt, read
from rag_kvcache.report import Generation, Report, Usage
from rag_kvcache.segment import Document, Reason
from rag_kvcache.settings import Settings

if TYPE_CHECKING:
    from transformers import GenerationConfig


class Pipeline:
    """Serves requests on one model, one at a time; see ``run``."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PromptTokenizer,
        memory: Memory,
        settings: Settings,
        partial: Partial,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._memory, self._settings = memory, settings
        self._partial = partial
        self.window = model.context_window(tokenizer.limit)

    def run(self, request: Request, emit: Emit, cancelled: Event) -> Generation | None:
        """Answer a request; its text goes to ``emit`` as it comes. None when cancelled before its turn.

        What is built is stored after the answer is complete: a request that fails stores nothing.
        """
        started = time.perf_counter()
        prompt = self._read(request)
        attempt = self._partial.attempt(request, prompt)
        config = self._decoding(request, len(prompt.ids))
        watch = Watch(self._tokenizer.decode, request.stop, self._model.eos_ids(config), emit, cancelled)
        with self._model.lock:
            if cancelled.is_set():
                return None
            self._model.refresh_if_changed()
            refusal = self._refusal(request.reuse, config, len(prompt.ids))
            if refusal is None:
                planner = self._planner(request.tenant)
                static = self._memory.static_cuts(planner, prompt.ids, prompt.layout, request.tenant)
                plan = planner.plan(prompt.ids, prompt.segments(static))
                plan = attempt.widened(plan, planner, static[-1] if static else prompt.layout.head)
                capacity = len(prompt.ids) + (config.max_new_tokens or 0)
                plan, arena = self._placed_or_empty(plan, capacity, attempt)
                self._model.generate(
                    prompt.ids, arena, config, request.seed, watch.on_token, attempt.listener
                )
                plan = self._memory.store(plan, planner, prompt.ids, arena, request.tenant)
                attempt.learn(arena)
                self._model.give_back(arena)
            else:
                plan = prefill_all(prompt.segments(), refusal)
                self._model.generate(prompt.ids, None, config, request.seed, watch.on_token)
        watch.close()
        return _account(request, prompt, plan, attempt, watch, started)

    def warm(
        self, prompt: str | Sequence[Mapping[str, Any]], document: Document, tenant: str
    ) -> tuple[int, Reason | None]:
        """Store the KV of a prompt up to the end of ``document`` in it; what stands before it is static.

        Returns the number of tokens prefilled (0 when all was cached), and why the document could not be
        stored, if so.
        """
        known = self._memory.locator([document], tenant)
        found = read(prompt, known, None, self._tokenizer, self._settings.block_tokens)
        if not found.has_offsets:
            return 0, found.encoded.without_offsets
        if not found.layout.documents:
            return 0, Reason.NO_DOCUMENT_FOUND
        stop = found.layout.documents[0][1]
        with self._model.lock:
            self._model.refresh_if_changed()
            refusal = self._unservable(len(found.ids))
            if refusal is not None:
                return 0, refusal
            self._memory.name_static(found.ids[: found.layout.head], tenant)
            planner = self._planner(tenant)
            segments = found.segments(static=(found.layout.head,))
            plan = planner.plan(found.ids[:stop], [s for s in segments if s.stop <= stop])
            target = plan.steps[-1]
            if target.store:
                arena = self._placed(plan, stop + 1)
                self._model.prefill(found.ids[:stop], arena)
                plan = self._memory.store(plan, planner, found.ids, arena, tenant)
                self._model.give_back(arena)
        if target.entry is not None:
            return 0, None
        return (stop - plan.reused, None) if plan.steps[-1].store else (0, plan.steps[-1].reason)

    def count_tokens(self, prompt: str | Sequence[Mapping[str, Any]]) -> int:
        """Number of tokens of a prompt."""
        return len(read(prompt, Locator(()), None, self._tokenizer, self._settings.block_tokens).ids)

    def _read(self, request: Request) -> ReadPrompt:
        """Render, locate documents, tokenise."""
        known = self._memory.locator(request.documents, request.tenant)
        return read(request.prompt, known, request.question, self._tokenizer, self._settings.block_tokens)

    def _decoding(self, request: Request, tokens: int) -> GenerationConfig:
        """How to decode. A default length shrinks to fit the window; an explicit one must fit."""
        room = self.window - tokens
        wanted = min(request.max_new_tokens, room) if request.max_is_default else request.max_new_tokens
        if room < 1 or wanted > room:
            raise PromptTooLongError(tokens, max(1, wanted), self.window)
        return self._model.generation_config(
            Decoding(wanted, request.temperature, request.top_p, request.seed, request.generate_kwargs)
        )

    def _refusal(self, reuse: str, config: GenerationConfig, tokens: int) -> Reason | None:
        """Why this request runs uncached, if it does."""
        if reuse == "off":
            return Reason.REUSE_OFF
        if not self._model.can_continue(config):
            return Reason.DECODING_MODE
        return self._unservable(tokens)

    def _unservable(self, tokens: int) -> Reason | None:
        """Why a prompt of this many tokens cannot use cached prefixes with this model, if so."""
        if self._model.geometry is None:
            return Reason.UNSUPPORTED_FAMILY
        limit = self._model.exact_limit
        return Reason.LENGTH_DEPENDENT_ROPE if limit is not None and tokens >= limit else None

    def _planner(self, tenant: str) -> Planner:
        geometry = self._model.geometry
        size = 0 if geometry is None else geometry.bytes_per_token
        return self._memory.planner(self._model.fingerprint, tenant, size)

    def _placed(self, plan: Plan, capacity: int) -> Arena:
        """A new arena that holds what the plan reuses."""
        arena = self._model.new_arena(capacity)
        for step in plan.steps:
            if step.entry is not None:
                arena.place(step.entry.planes, step.reused)
        return arena

    def _placed_or_empty(self, plan: Plan, capacity: int, attempt: Attempt) -> tuple[Plan, Arena]:
        """``_placed``, with moved documents too, and what of them to compute anew chosen.

        Where that fails, an empty arena and a plan that reuses nothing.
        """
        try:
            arena = self._placed(plan, capacity)
            return attempt.moved_into(arena, plan), arena
        except Exception as e:
            self._memory.levels.fault("place", e)
            refused = prefill_all([step.segment for step in plan.steps], Reason.STORE_FAULT)
            return refused, self._model.new_arena(capacity)


def _account(
    request: Request, prompt: ReadPrompt, plan: Plan, attempt: Attempt, watch: Watch, started: float
) -> Generation:
    """The answer with its report."""
    tokens, answer = len(prompt.ids), watch.answer
    report = Report(
        ttft_s=None if watch.first is None else watch.first - started,
        total_s=time.perf_counter() - started,
        prompt_tokens=tokens,
        reused_tokens=plan.reused,
        prefilled_tokens=tokens - plan.reused,
        mode=request.reuse,
        reason=_reason(request, prompt, plan),
        segments=tuple(step.report() for step in plan.steps),
        gate=None if attempt.decision is None else str(attempt.decision.reason),
        similarity=None if attempt.decision is None else attempt.decision.similarity,
        repair=attempt.repaired_by if plan.moved else None,
    )
    usage = Usage(tokens, len(answer.token_ids), plan.reused)
    return Generation(answer.text, answer.token_ids, watch.finish_reason, usage, report)


def _reason(request: Request, prompt: ReadPrompt, plan: Plan) -> Reason:
    """Where no document was found, the prompt is to blame, whatever the cache did."""
    if plan.reason in (
        Reason.REUSE_OFF,
        Reason.UNSUPPORTED_FAMILY,
        Reason.DECODING_MODE,
        Reason.LENGTH_DEPENDENT_ROPE,
    ):
        return plan.reason
    if not prompt.has_offsets:
        return prompt.encoded.without_offsets
    return Reason.NO_DOCUMENT_FOUND if request.documents and not prompt.layout.documents else plan.reason
