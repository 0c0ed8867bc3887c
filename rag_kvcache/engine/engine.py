"""The engine that users and adapters call."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Self, Unpack

from rag_kvcache.engine import default_prompt, worker
from rag_kvcache.engine.account import Ledger
from rag_kvcache.engine.memory import Memory
from rag_kvcache.engine.partial import Partial
from rag_kvcache.engine.pipeline import Pipeline
from rag_kvcache.engine.request import (
    AnswerOptions,
    Options,
    Prompt,
    Request,
    check_documents,
    check_prompt,
    check_question,
    check_request,
    check_tenant,
)
from rag_kvcache.engine.worker import Emit
from rag_kvcache.errors import EngineClosedError, InvalidTypeError, RequestError, UnsupportedModelError
from rag_kvcache.gate import Gate, SbertGate
from rag_kvcache.keys import framed_digest
from rag_kvcache.model.language_model import LanguageModel
from rag_kvcache.model.load import load
from rag_kvcache.model.tokenizer import PromptTokenizer
from rag_kvcache.report import Chunk, Generation, Stats, WarmReport
from rag_kvcache.segment import Document
from rag_kvcache.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


class Engine:
    """Generates with a Hugging Face model, never prefilling the same retrieved document twice.

    Contract: in exact mode the answer is the one that transformers' ``generate`` gives on the same token
    ids; a fault of the cache changes the report, never the answer. Safe to call from many threads; one
    generation runs at a time per model object. The model and the tokenizer are left as they were.

    ``settings`` or keyword arguments of ``Settings`` (which win) configure it. ``gate`` decides in mode
    "gated" which questions may reuse documents behind other text; by default an ``SbertGate`` is made from
    the settings. A gate that is given is closed with the engine.

    Raises ConfigurationError for wrong settings, UnsupportedModelError for a model that is no decoder or,
    with reuse="always", one whose keys cannot be moved, MissingExtraError for reuse="gated" without
    sentence-transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        gate: Gate | None = None,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        self.settings = _settings(settings, overrides)
        self.model, self.tokenizer = model, tokenizer
        self._language_model = LanguageModel(model)
        self._words = PromptTokenizer(tokenizer)
        self._memory = Memory(self.settings, self._words.fingerprint)
        self._partial = Partial(self._language_model, self._gate(gate), self.settings)
        self._pipeline = Pipeline(
            self._language_model, self._words, self._memory, self.settings, self._partial
        )
        self._ledger = Ledger()
        self._closed = Event()
        self.model_name = self._language_model.name
        if self._language_model.geometry is None and self.settings.reuse != "off":
            _log.warning("%s runs uncached: %s", self.model_name, self._language_model.support_reason)

    def _gate(self, given: Gate | None) -> Gate | None:
        """The gate, where these settings need one; the model is tried out where they move its keys."""
        if self.settings.reuse not in ("gated", "always"):
            return given
        with self._language_model.lock:
            moves = self._language_model.moves
        if moves.rotations is None:
            if self.settings.reuse == "always":
                raise UnsupportedModelError(
                    f"reuse='always' needs a model whose cached keys can be moved, and {moves.reason}: use "
                    f"reuse='exact', or 'gated', which then falls back to exact reuse"
                )
            _log.warning("documents are reused as exact prefixes only: %s", moves.reason)
        if given is not None or self.settings.reuse == "always":
            return given
        return SbertGate(
            self.settings.gate_threshold,
            self.settings.gate_model,
            self.settings.gate_timeout_s,
            self.settings.ttl_s,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        gguf_file: str | None = None,
        dtype: Any = "auto",
        device: Any = None,
        device_map: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        gate: Gate | None = None,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> Self:
        """Load a model by hub id, local folder, folder and ``gguf_file``, or "demo".

        Raises ModelNotFoundError when there is no such model, ConfigurationError for wrong settings.
        """
        checked = _settings(settings, overrides)  # before the model, which may take minutes
        named = tokenizer if tokenizer is None or isinstance(tokenizer, str | Path) else None
        weights, words = load(
            model,
            gguf_file=gguf_file,
            dtype=dtype,
            device=device,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
            model_kwargs=model_kwargs,
            tokenizer=named,
            tokenizer_kwargs=tokenizer_kwargs,
        )
        own = words if tokenizer is None or isinstance(tokenizer, str | Path) else tokenizer
        engine = cls(weights, own, gate=gate, settings=checked)
        engine.model_name = str(model)
        return engine

    @property
    def context_window(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._pipeline.window

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._words.has_chat_template

    @property
    def dtype(self) -> str:
        """Data type of the weights and of the KV, e.g. "float32"."""
        return self._language_model.dtype

    @property
    def fingerprint(self) -> str:
        """Names the model and tokenizer as they are: equal for equal weights, settings and templates."""
        return framed_digest(self._language_model.fingerprint, self._words.fingerprint).hex()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Answer ``prompt``: text, or chat messages with "role" and "content".

        documents: Documents or strings that may stand in the prompt; without any, texts seen before are
            looked for.
        question: what is asked, if known; it is kept out of the cache.
        tenant: whose cache to use. reuse: "exact", "gated", "always" or "off", instead of the engine's.
        max_new_tokens, temperature (0 is greedy), top_p, seed: beat the model's own generation config,
            which decides what is not given. stop: strings to end before. generate_kwargs: further
            ``GenerationConfig`` fields.

        Raises RequestError and its kinds; nothing is stored then.
        """
        job = self._job(check_request(self.settings, prompt, **options))
        generation = job(lambda text: None, Event())
        if generation is None:
            raise EngineClosedError
        return generation

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Chunk, None, None]:
        """``generate`` in pieces, made in a thread of its own; the last chunk carries the generation.

        Closing the iterator stops the generation.
        """
        return worker.stream(self._job(check_request(self.settings, prompt, **options)))

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """``generate`` without blocking the event loop. Cancelling the task stops the generation."""
        async with aclosing(self.astream(prompt, **options)) as chunks:
            async for chunk in chunks:
                if chunk.generation is not None:
                    return chunk.generation
        raise EngineClosedError

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Chunk]:
        """``stream`` for an event loop."""
        return worker.astream(self._job(check_request(self.settings, prompt, **options)))

    def answer(
        self,
        question: str,
        documents: Iterable[Document | str],
        *,
        system: str | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Generation:
        """Answer a question from documents, with a plain RAG prompt; further arguments as in ``generate``."""
        given = check_documents(documents)
        check_question(question)
        prompt = self._rag_prompt(default_prompt.joined(given), question, system)
        return self.generate(prompt, documents=given, question=question, **options)

    def warm(
        self,
        documents: Iterable[Document | str],
        *,
        prompt: Prompt | None = None,
        slot: str = default_prompt.SLOT,
        system: str | None = None,
        tenant: str | None = None,
    ) -> WarmReport:
        """Build the caches of documents ahead of the first question.

        prompt: the chain's own prompt (text or messages) with ``slot`` where documents go; by default the
            prompt of ``answer`` (with ``system``). What stands before the slot becomes the static prompt.

        Raises RequestError when ``slot`` is not in ``prompt``.
        """
        self._check_open()
        started, who = time.perf_counter(), check_tenant(tenant, self.settings)
        if prompt is None:
            prompt, slot = (
                self._rag_prompt(default_prompt.SLOT, default_prompt.QUESTION, system),
                default_prompt.SLOT,
            )
        template = check_prompt(prompt)
        if not _has_slot(template, slot):
            raise RequestError(f"the prompt has no slot {slot!r}: name the place of the documents with slot=")
        done = [
            (d, *self._pipeline.warm(_filled(template, slot, d.text), d, who))
            for d in check_documents(documents)
        ]
        skipped = tuple((d.id or d.text[:40], reason) for d, _, reason in done if reason is not None)
        built = sum(tokens > 0 for _, tokens, _ in done)
        return WarmReport(
            documents=len(done),
            built=built,
            cached=len(done) - built - len(skipped),
            skipped=skipped,
            tokens=sum(tokens for _, tokens, _ in done),
            seconds=time.perf_counter() - started,
        )

    def remember(self, documents: Iterable[Document | str], *, tenant: str | None = None) -> None:
        """Texts to look for in later prompts that come without documents."""
        self._check_open()
        self._memory.documents.remember(check_documents(documents), check_tenant(tenant, self.settings))

    def invalidate(self, target: Document | str, *, tenant: str | None = None) -> int:
        """Forget a document, given as such, by its text or by its id, and all that was computed behind it.

        "all" forgets everything of the tenant. Returns the number of entries dropped.
        """
        who = check_tenant(tenant, self.settings)
        if not isinstance(target, Document | str):
            kind = type(target).__name__
            raise InvalidTypeError(f"invalidate takes a Document, a text or an id, not {kind}")
        if target == "all":
            self._partial.forget(who)
            return self._memory.invalidate(None, who)
        for digest in self._memory.text_digests(target, who):
            self._partial.forget(who, digest)
        return self._memory.invalidate(target, who)

    def refresh(self) -> None:
        """Weights were changed behind torch's back (through ``.data``): take the fingerprint again."""
        with self._language_model.lock:
            self._language_model.refresh()

    def count_tokens(self, prompt: Prompt) -> int:
        """Number of tokens of a prompt, chat template included."""
        return self._pipeline.count_tokens(check_prompt(prompt))

    def stats(self) -> Stats:
        """Counters since the start, and what the tiers hold."""
        return self._ledger.stats(self._memory.levels)

    def close(self) -> None:
        """Wait for the running generation, then free all caches. The model stays the caller's."""
        self._closed.set()
        with self._language_model.lock:
            self._memory.close()
            self._partial.close()
            self._language_model.give_back(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _job(self, request: Request) -> worker.Job:
        self._check_open()
        if request.reuse == "gated" and self._partial.gate is None:
            raise RequestError("this engine has no gate: make it with reuse='gated' or gate=")
        return partial(self._run, request)

    def _run(self, request: Request, emit: Emit, cancelled: Event) -> Generation | None:
        self._check_open()
        generation = self._pipeline.run(request, emit, cancelled)
        if generation is not None:
            self._ledger.add(generation.report)
        return generation

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise EngineClosedError

    def _rag_prompt(self, context: str, question: str, system: str | None) -> Prompt:
        make = default_prompt.rag_messages if self.has_chat_template else default_prompt.rag_text
        return make(context, question, system)


def _settings(settings: Settings | None, overrides: Mapping[str, Any]) -> Settings:
    if settings is None:
        return Settings.make(**overrides)
    return Settings.make(**{**settings.model_dump(), **overrides}) if overrides else settings


def _has_slot(template: str | Sequence[Mapping[str, Any]], slot: str) -> bool:
    texts = [template] if isinstance(template, str) else [message["content"] for message in template]
    return any(slot in text for text in texts)


def _filled(template: str | Sequence[Mapping[str, Any]], slot: str, text: str) -> Prompt:
    """The prompt with a document in its slot."""
    if isinstance(template, str):
        return template.replace(slot, text)
    return [{**message, "content": message["content"].replace(slot, text)} for message in template]
