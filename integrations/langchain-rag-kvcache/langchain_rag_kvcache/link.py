"""Which Documents may stand in a prompt, and how they were found.

The link only narrows the candidates: the engine looks for their exact text in the rendered prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables.config import var_child_runnable_config

from langchain_rag_kvcache.documents import documents_within, to_documents
from langchain_rag_kvcache.retrieved import retrieved_documents
from rag_kvcache.report import Report
from rag_kvcache.segment import Document, SegmentKind


class Link(StrEnum):
    """How the documents of a request were linked to its prompt."""

    GIVEN = "given"  #: the caller bound them: ``.bind(documents=[...])``
    RUN = "run"  #: retrieved in the same run
    ARTIFACT = "artifact"  #: a ToolMessage's artifact
    REGISTRY = "registry"  #: no candidates, but the engine knew a text in the prompt
    BLOCK = "block"  #: no known text in the prompt: chained token blocks
    NONE = "none"  #: nothing


@dataclass(frozen=True)
class Candidates:
    """Documents that may stand in one prompt, and where they came from.

    question: what they were retrieved for. Where it stands in the prompt it is kept out of the cache.
    """

    documents: tuple[Document, ...] = ()
    source: Link = Link.NONE
    question: str | None = None

    def link(self, report: Report) -> Link:
        """How what the report tells of was linked."""
        kinds = {segment.kind for segment in report.segments}
        if SegmentKind.DOCUMENT in kinds:
            return Link.REGISTRY if self.source is Link.NONE else self.source
        return Link.BLOCK if SegmentKind.BLOCK in kinds else Link.NONE


def candidates(
    *, given: Iterable[Any] | None, parents: Iterable[UUID | None], messages: Sequence[BaseMessage] = ()
) -> Candidates:
    """The candidates of one request: those given, else those retrieved in its run and in its tool messages.

    Wrong ``given`` documents raise; a fault in finding the others is logged and costs the link only.
    """
    if given is not None:
        return Candidates(to_documents(given), Link.GIVEN)
    handler = retrieved_documents()
    try:
        runs = list(parents)
        in_run = [document for parent in runs for document in handler.near(parent)]
        question = next((query for parent in runs if (query := handler.query_near(parent))), None)
        in_artifacts = [
            document
            for message in messages
            if isinstance(message, ToolMessage)
            for document in documents_within(message.artifact)
        ]
        found = to_documents([*in_run, *in_artifacts])
        if messages and not _asked(question, messages, found):
            question = None
    except Exception as error:
        handler.log_fault(error)
        return Candidates()
    if not found:
        return Candidates()
    return Candidates(found, Link.RUN if in_run else Link.ARTIFACT, question)


def _asked(question: str | None, messages: Sequence[BaseMessage], documents: Sequence[Document]) -> bool:
    """Whether the retriever's query stands in what the user says last, its documents apart.

    A rewritten query (history-aware retrieval) may stand elsewhere by chance, in the system prompt say, and
    would then be taken for a question in front of the documents.
    """
    last = next((m for m in reversed(messages) if isinstance(m, HumanMessage)), None)
    if question is None or last is None:
        return False
    said = str(last.text)
    for document in documents:
        said = said.replace(document.text.strip(), "")
    return question in said


def parent_run(run_manager: Any) -> UUID | None:
    """The run that a model is called in.

    LangChain hands ``_stream`` no run manager: then the active config knows.
    """
    if run_manager is None:
        config = var_child_runnable_config.get()
        run_manager = config.get("callbacks") if config else None
    return _parent_id(run_manager)


def parents_by_prompt(prompts: Sequence[str], callbacks: Any) -> Mapping[str, tuple[UUID, ...]]:
    """The parent runs of a batch's prompts.

    A batch of text prompts comes from as many runs, each with its own callbacks, but the model is handed
    the run manager of the first alone.
    """
    if not isinstance(callbacks, list) or len(callbacks) != len(prompts):
        callbacks = [callbacks] * len(prompts)
    parents: dict[str, tuple[UUID, ...]] = {}
    for prompt, own in zip(prompts, callbacks, strict=True):
        parent = _parent_id(own)
        if parent is not None:
            parents[prompt] = (*parents.get(prompt, ()), parent)
    return parents


def _parent_id(callbacks: Any) -> UUID | None:
    parent = getattr(callbacks, "parent_run_id", None)
    return parent if isinstance(parent, UUID) else None
