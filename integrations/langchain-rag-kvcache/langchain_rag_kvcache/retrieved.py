"""Which Documents were retrieved in the run that a model is called in.

LangChain gives a model its prompt, not the Documents the prompt was made of. One callback handler for the
whole process notes what the retrievers of each run returned; a model then asks with its parent run's id.
The retriever is usually no ancestor of the model but a cousin, so Documents are noted on every run above
the retriever, and the model takes those of the nearest run above itself. Runs with different roots share
no ancestor, hence never see each other's Documents.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")


@dataclass(eq=False, slots=True)
class _Run:
    """A run that has not ended.

    below: the ids of live runs under it, kept for roots only. ``query``: what its documents were last
        retrieved for.
    """

    id: UUID
    parent: _Run | None
    documents: OrderedDict[str, Document] = field(default_factory=OrderedDict)
    below: set[UUID] = field(default_factory=set)
    query: str | None = None

    def upwards(self) -> Iterator[_Run]:
        run: _Run | None = self
        while run is not None:
            yield run
            run = run.parent

    @property
    def root(self) -> _Run:
        *_, root = self.upwards()
        return root


def _never_raises(method: Callable[_P, None]) -> Callable[_P, None]:
    """A fault in here may cost reuse, never the user's chain."""

    @functools.wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            handler = args[0]
            assert isinstance(handler, RetrievedDocuments)
            handler.log_fault(error)

    return guarded


class RetrievedDocuments(BaseCallbackHandler):
    """Notes the Documents that each live run has retrieved, and forgets a run when it ends.

    max_runs: runs kept at most; the oldest go first. Runs end by themselves, this bound is for chains
        that were abandoned half-way.
    max_foreign: runs kept that were only ever seen as a parent (a LangSmith function, or a run begun
        before the handler was registered). They never report their end.
    max_documents: Documents kept per run; the oldest go first.
    """

    run_inline = True

    def __init__(self, *, max_runs: int = 10_000, max_foreign: int = 256, max_documents: int = 1_000) -> None:
        self._max_runs = max_runs
        self._max_foreign = max_foreign
        self._max_documents = max_documents
        self._runs: OrderedDict[UUID, _Run] = OrderedDict()
        self._foreign: OrderedDict[UUID, None] = OrderedDict()
        self._lock = threading.Lock()
        self._fault_logged = False

    def near(self, run_id: UUID | None) -> tuple[Document, ...]:
        """The Documents of the nearest run that has any, from ``run_id`` upwards."""
        with self._lock:
            run = self._nearest(run_id)
            return () if run is None else tuple(run.documents.values())

    def query_near(self, run_id: UUID | None) -> str | None:
        """What the Documents of ``near`` were last retrieved for: often the question itself."""
        with self._lock:
            run = self._nearest(run_id)
            return None if run is None else run.query

    def _nearest(self, run_id: UUID | None) -> _Run | None:
        run = self._runs.get(run_id) if run_id is not None else None
        upwards = run.upwards() if run is not None else iter(())
        return next((ancestor for ancestor in upwards if ancestor.documents), None)

    def log_fault(self, error: Exception) -> None:
        """Warn the first time that linking fails; later faults are logged at debug level."""
        level = logging.DEBUG if self._fault_logged else logging.WARNING
        self._fault_logged = True
        _log.log(
            level,
            "retrieved documents could not be linked to the model's prompt; it is answered without: %r",
            error,
            exc_info=error,
        )

    # Not __len__: LangChain takes a false handler for a missing one.
    @property
    def live_runs(self) -> int:
        """The number of runs kept."""
        return len(self._runs)

    # A handler that is deep-copied with a config stays the one that the models ask.
    def __copy__(self) -> RetrievedDocuments:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RetrievedDocuments:
        return self

    @property
    def ignore_llm(self) -> bool:
        """Models ask with their parent run's id, their own runs need no notes."""
        return True

    @property
    def ignore_chat_model(self) -> bool:
        """As ``ignore_llm``."""
        return True

    @_never_raises
    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A chain, graph or function began."""
        self._begin(run_id, parent_run_id)

    @_never_raises
    def on_tool_start(
        self,
        serialized: Any,
        input_str: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """A tool began."""
        self._begin(run_id, parent_run_id)

    @_never_raises
    def on_retriever_start(
        self, serialized: Any, query: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A retriever began."""
        self._begin(run_id, parent_run_id)
        with self._lock:
            self._runs[run_id].query = query if isinstance(query, str) else None

    @_never_raises
    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A retriever returned: note its Documents on every run above it."""
        found = {d.page_content: d for d in documents if isinstance(d, Document) and d.page_content}
        with self._lock:
            run = self._runs.get(run_id) or self._add(run_id, parent_run_id)
            for ancestor in run.upwards():
                ancestor.documents.update(found)
                ancestor.query = run.query
                while len(ancestor.documents) > self._max_documents:
                    ancestor.documents.popitem(last=False)
            self._drop(run_id)

    @_never_raises
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A chain, graph or function ended."""
        self._end(run_id)

    @_never_raises
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A chain, graph or function failed."""
        self._end(run_id)

    @_never_raises
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool returned."""
        self._end(run_id)

    @_never_raises
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool failed."""
        self._end(run_id)

    @_never_raises
    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A retriever failed."""
        self._end(run_id)

    def _begin(self, run_id: UUID, parent_run_id: UUID | None) -> None:
        with self._lock:
            if run_id not in self._runs:
                self._add(run_id, parent_run_id)

    def _end(self, run_id: UUID) -> None:
        with self._lock:
            self._drop(run_id)

    def _add(self, run_id: UUID, parent_run_id: UUID | None) -> _Run:
        parent = None
        if parent_run_id is not None:
            parent = self._runs.get(parent_run_id) or self._add_foreign(parent_run_id)
        run = self._runs[run_id] = _Run(run_id, parent)
        if parent is not None:
            run.root.below.add(run_id)
        while len(self._runs) > self._max_runs:
            self._drop(next(iter(self._runs)))
        return run

    def _add_foreign(self, run_id: UUID) -> _Run:
        run = self._runs[run_id] = _Run(run_id, None)
        self._foreign[run_id] = None
        while len(self._foreign) > self._max_foreign:
            self._drop(next(iter(self._foreign)))
        return run

    def _drop(self, run_id: UUID) -> None:
        self._foreign.pop(run_id, None)
        run = self._runs.pop(run_id, None)
        if run is None:
            return
        if run.parent is not None:
            run.root.below.discard(run_id)
        for left_over in run.below:
            self._runs.pop(left_over, None)


_registration = threading.Lock()


def retrieved_documents() -> RetrievedDocuments:
    """The process's handler. The first call registers it with LangChain, for every run from then on."""
    with _registration:
        return _registered()


@functools.cache
def _registered() -> RetrievedDocuments:
    handler = RetrievedDocuments()
    # The default makes the handler present in every thread and context.
    register_configure_hook(ContextVar("rag_kvcache_retrieved_documents", default=handler), inheritable=True)
    return handler
