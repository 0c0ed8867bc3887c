"""Which nodes the query around an LLM call has retrieved.

A query engine hands the LLM one rendered prompt and nothing else. LlamaIndex's instrumentation tells the
rest: every instrumented call is a span with a parent, ``synthesize`` and ``get_response`` carry the nodes
and text chunks in their arguments, retrievers fire ``RetrievalEndEvent``. Two handlers on the root
dispatcher write these into a ``SpanLog``; an LLM call asks it what its own ancestors have seen.

The log only narrows the candidates: whether, and where, a text stands in the prompt is decided by the
engine on the prompt itself. Without it the engine still finds texts that it has seen before.

    _query ─┬─ retrieve ── RetrievalEndEvent(nodes)      kept by `retrieve`, handed to `_query` at its end
            └─ synthesize(nodes) ── get_response(text_chunks) ── predict ── chat      the LLM asks here

A streaming query engine, or a retriever called by hand, leaves no open span by the time the LLM runs.
Their nodes are kept in a short list of finished runs, of which the newest with a text in the prompt is
taken.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from types import AsyncGeneratorType, GeneratorType
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.instrumentation.events.synthesis import GetResponseStartEvent
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import QueryBundle
from llama_index.llms.rag_kvcache.nodes import as_document
from llama_index_instrumentation import get_dispatcher
from pydantic import PrivateAttr

from rag_kvcache.segment import Document

_log = logging.getLogger(__name__)

_MAX_SPANS = 8192  # open spans; more can only mean spans that never ended
_MAX_DOCUMENTS = 1024  # per span
_MAX_FINISHED = 64  # runs whose LLM call may still come
_MIN_PIECE = 48  # characters; a shorter rest of a chunk is glue
_PASSAGE = 400  # characters
_SENTENCE_END = re.compile(r"\n+|(?<=[.!?])\s+|(?<=[。！？])")
_STREAMS = (
    StreamingResponse,
    AsyncStreamingResponse,
    StreamingAgentChatResponse,
    GeneratorType,
    AsyncGeneratorType,
)


@dataclass(frozen=True)
class Retrieved:
    """What an LLM call's run has retrieved: candidates, and the question if the run knows it."""

    documents: tuple[Document, ...] = ()
    question: str | None = None


@dataclass(frozen=True)
class _Run:
    nodes: tuple[Document, ...]
    chunks: tuple[str, ...] = ()
    question: str | None = None


@dataclass
class _Span:
    parent: str | None
    nodes: dict[str, Document] = field(default_factory=dict)  # text -> document
    chunks: list[str] = field(default_factory=list)
    question: str | None = None
    retrieves: bool = False  # its nodes come from retrievers within it, and go to its parent
    kept: bool = False  # a synthesizer within it left a stream behind, and its run is in the list

    def add(self, documents: Iterable[Document]) -> None:
        for document in documents:
            if document.text.strip() and len(self.nodes) < _MAX_DOCUMENTS:
                self.nodes.setdefault(document.text, document)


class SpanLog:
    """Open spans and what each has retrieved. Thread-safe and bounded; spans are dropped at their end."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Span] = OrderedDict()
        self._finished: deque[_Run] = deque(maxlen=_MAX_FINISHED)
        self._lock = Lock()
        self._fault_logged = False

    def fault(self, what: str, error: Exception) -> None:
        """Warn the first time that linking fails; later faults are logged at debug level."""
        level = logging.DEBUG if self._fault_logged else logging.WARNING
        self._fault_logged = True
        _log.log(
            level,
            "retrieved nodes could not be linked to the model's prompt (%s); it is answered without: %r",
            what,
            error,
            exc_info=error,
        )

    def _readable(self, nodes: Iterable[Any]) -> Iterable[Document]:
        """Nodes as documents; one whose text cannot be read is told and left out."""
        for node in nodes:
            try:
                yield as_document(node)
            except Exception as e:  # a node class of the user's may raise what it likes
                self.fault(f"a node of type {type(node).__name__} has no text for the LLM", e)

    def enter(self, span_id: str, parent: str | None, arguments: dict[str, Any], instance: Any) -> None:
        """A span starts; a response synthesizer's span brings its nodes or chunks."""
        span = _Span(parent)
        if isinstance(instance, BaseSynthesizer):
            self._read_arguments(span, arguments)
        with self._lock:
            self._open[span_id] = span
            while len(self._open) > _MAX_SPANS:
                self._open.popitem(last=False)

    def leave(self, span_id: str, result: Any = None) -> None:
        """A span ends: what it retrieved now belongs to the span around it."""
        with self._lock:
            span = self._open.get(span_id)
            if span is None:
                return
            parent = self._open.get(span.parent) if span.parent else None
            streams = isinstance(result, _STREAMS)
            by_hand = span.retrieves and span.parent is None and _is_retriever(span_id)
            if span.nodes and not span.kept and (streams or by_hand):
                self._finished.append(_Run(tuple(span.nodes.values()), tuple(span.chunks), span.question))
                span.kept = True
            if parent is not None:
                parent.kept |= span.kept
                if not span.nodes:
                    parent.chunks += [c for c in span.chunks if c not in parent.chunks]
                if span.retrieves:
                    parent.add(span.nodes.values())
                    parent.retrieves = True
            del self._open[span_id]

    def drop(self, span_id: str) -> None:
        """A span failed."""
        with self._lock:
            self._open.pop(span_id, None)

    def retrieved(self, span_id: str | None, nodes: Iterable[Any]) -> None:
        """A retriever returned these nodes inside this span."""
        documents = list(self._readable(nodes))
        with self._lock:
            if span_id is None or (span := self._open.get(span_id)) is None:
                self._finished.append(_Run(tuple(documents)))
            else:
                span.add(documents)
                span.retrieves = True

    def chunks(self, span_id: str | None, chunks: Iterable[str], question: str) -> None:
        """A response synthesizer starts on these chunks inside this span."""
        with self._lock:
            if span_id is not None and (span := self._open.get(span_id)) is not None:
                span.chunks += [c for c in chunks if c not in span.chunks][:_MAX_DOCUMENTS]
                span.question = span.question or question

    def of(self, span_id: str | None, prompt: str) -> Retrieved:
        """What the run around this span has retrieved, or a finished run that left its text in ``prompt``."""
        with self._lock:
            run = self._around(span_id)
            finished = tuple(self._finished)
        for seen in (run, *reversed(finished)):
            if any(stands_in(text, prompt) for text in (*(d.text for d in seen.nodes), *seen.chunks)):
                return Retrieved(tuple(candidates(seen.nodes, seen.chunks)), seen.question)
        return Retrieved(tuple(candidates(run.nodes, run.chunks)), run.question)

    def __len__(self) -> int:
        """Number of open spans."""
        return len(self._open)

    def _read_arguments(self, span: _Span, arguments: dict[str, Any]) -> None:
        if (nodes := arguments.get("nodes")) is not None:
            span.add(self._readable(nodes))
        if (chunks := arguments.get("text_chunks")) is not None:
            span.chunks = [c for c in chunks if isinstance(c, str)][:_MAX_DOCUMENTS]
        query = arguments.get("query", arguments.get("query_str"))
        span.question = query.query_str if isinstance(query, QueryBundle) else query

    def _around(self, span_id: str | None) -> _Run:
        # Up from the LLM call to the nearest span that knows its nodes, and no further: spans around
        # that one hold what other, perhaps concurrent, queries have retrieved.
        chunks: list[str] = []
        question: str | None = None
        for _ in range(_MAX_SPANS):
            span = self._open.get(span_id) if span_id is not None else None
            if span is None:
                break
            chunks += span.chunks
            question = question or span.question
            if span.nodes:
                return _Run(tuple(span.nodes.values()), tuple(chunks), question)
            span_id = span.parent
        return _Run((), tuple(chunks), question)


def candidates(nodes: Iterable[Document], chunks: Sequence[str]) -> list[Document]:
    """The nodes, and parts of the chunks that are no whole node.

    Synthesizers join nodes into chunks, and split what does not fit into the context window. A joined
    chunk is no candidate: it would hide its nodes, which other questions find in other company. Where a
    node stands only in part, its passages are candidates: where a chunk is cut depends on the question's
    length, where a passage ends does not.
    """
    whole = [d for d in nodes if d.text.strip()]
    found = {d.text.strip(): d for d in whole}
    passages = [Document(p, d.id, d.metadata) for d in whole for p in _passages(d.text)] if chunks else []
    for chunk in dict.fromkeys(chunks):
        pieces = [chunk]
        for text in sorted((d.text.strip() for d in whole), key=len, reverse=True):
            pieces = [rest for piece in pieces for rest in piece.split(text)]
        for piece in (p.strip() for p in pieces if len(p.strip()) >= _MIN_PIECE):
            for part in [p for p in passages if p.text in piece] or [Document(piece)]:
                found.setdefault(part.text, part)
    return list(found.values())


def _passages(text: str) -> Iterable[str]:
    # Whole sentences, about _PASSAGE characters of them.
    start = 0
    for end in [m.end() for m in _SENTENCE_END.finditer(text)] + [len(text)]:
        while end - start >= 2 * _PASSAGE:  # no sentence ends for long
            yield text[start : start + _PASSAGE].strip()
            start += _PASSAGE
        if end - start >= _PASSAGE or end == len(text):
            if passage := text[start:end].strip():
                yield passage
            start = end


def stands_in(text: str, prompt: str) -> bool:
    """Whether a text stands in a prompt, give or take its outer whitespace or Python's escapes."""
    text = text.strip()
    return bool(text) and (text in prompt or repr(text)[1:-1] in prompt)


def _is_retriever(span_id: str) -> bool:
    # Span ids are "Class.method-uuid".
    method = span_id.rpartition(".")[2].partition("-")[0]
    return method in ("retrieve", "aretrieve", "_retrieve", "_aretrieve")


class RetrievedEvents(BaseEventHandler):
    """Feeds retrieval and synthesis events into a ``SpanLog``."""

    _spans: SpanLog = PrivateAttr()

    def __init__(self, log: SpanLog) -> None:
        super().__init__()
        self._spans = log

    @classmethod
    def class_name(cls) -> str:
        """Class name."""
        return "RetrievedEvents"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Record nodes and chunks; anything else is ignored. Never raises."""
        try:
            if isinstance(event, RetrievalEndEvent):
                self._spans.retrieved(event.span_id, event.nodes)
            elif isinstance(event, GetResponseStartEvent):
                self._spans.chunks(event.span_id, event.text_chunks, event.query_str)
        except Exception as error:
            self._spans.fault(type(event).__name__, error)


class RetrievedSpans(BaseSpanHandler[BaseSpan]):
    """Feeds spans into a ``SpanLog``. Keeps no spans of its own, so the base class stores nothing."""

    _spans: SpanLog = PrivateAttr()

    def __init__(self, log: SpanLog) -> None:
        super().__init__()
        self._spans = log

    @property
    def log(self) -> SpanLog:
        """Where the spans are recorded."""
        return self._spans

    @classmethod
    def class_name(cls) -> str:
        """Class name."""
        return "RetrievedSpans"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A span starts."""
        try:
            self._spans.enter(id_, parent_span_id, bound_args.arguments, instance)
        except Exception as error:
            self._spans.fault("start of a span", error)

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> None:
        """A span ends."""
        try:
            self._spans.leave(id_, result)
        except Exception as error:
            self._spans.fault("end of a span", error)

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> None:
        """A span failed."""
        self._spans.drop(id_)


def register() -> SpanLog:
    """Attach the handlers to the root dispatcher, once per process, and return their log."""
    root = get_dispatcher()
    handler = next((h for h in root.span_handlers if isinstance(h, RetrievedSpans)), None)
    if handler is None:
        handler = RetrievedSpans(SpanLog())
        root.add_span_handler(handler)
    if not any(isinstance(h, RetrievedEvents) for h in root.event_handlers):
        root.add_event_handler(RetrievedEvents(handler.log))
    return handler.log


def retrieved_for(log: SpanLog, prompt: str) -> Retrieved:
    """What the query around the running code has retrieved. Never raises: without it, reuse still works."""
    try:
        return log.of(active_span_id.get(), prompt)
    except Exception as error:
        log.fault("look-up", error)
        return Retrieved()
