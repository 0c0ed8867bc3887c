"""The log of spans: candidates, bounds, and what happens at a span's end."""

from __future__ import annotations

import logging

import pytest
from llama_index.core.schema import TextNode
from llama_index.llms.rag_kvcache.retrieved import SpanLog, candidates

from rag_kvcache.segment import Document

A, B = "a" * 30 + " first node", "b" * 30 + " second node"


def test_whole_nodes_stay_and_joined_chunks_are_left_out() -> None:
    nodes = [Document(A, id="a"), Document(B, id="b")]
    assert candidates(nodes, [f"{A}\n\n{B}", A]) == nodes


def test_passages_of_a_split_node_do_not_depend_on_the_cut() -> None:
    text = " ".join(f"Sentence number {i} says that {i} follows {i - 1}." for i in range(60))
    long = Document(text, id="long")
    cuts = [
        candidates([long, Document(A, id="a")], [text[:cut], text[cut:] + f"\n\n{A}"]) for cut in (1200, 1234)
    ]
    for found, cut in zip(cuts, (1200, 1234), strict=True):
        passages = [d for d in found if d.text not in (text, A)]
        assert {d.id for d in passages} == {"long"}
        inside = [d for d in passages if d.text in text[:cut]]
        assert sum(len(d.text) + 1 for d in inside) > cut - 500
    assert cuts[0] == cuts[1]


def test_a_rewritten_chunk_is_a_candidate_itself() -> None:
    assert [d.text for d in candidates([Document(A)], ["z" * 100])] == [A, "z" * 100]


def test_chunks_without_nodes_are_candidates() -> None:
    assert [d.text for d in candidates([], ["x" * 100, "short"])] == ["x" * 100]


def test_retrieved_nodes_go_to_the_span_around_and_end_with_it() -> None:
    log = SpanLog()
    log.enter("Engine.query-1", None, {}, None)
    log.enter("Retriever.retrieve-2", "Engine.query-1", {}, None)
    log.retrieved("Retriever.retrieve-2", [TextNode(text=A, id_="a")])
    log.leave("Retriever.retrieve-2", [])
    log.enter("LLM.chat-3", "Engine.query-1", {}, None)
    assert log.of("LLM.chat-3", f"... {A} ...").documents == (Document(A, id="a"),)
    log.leave("LLM.chat-3")
    log.leave("Engine.query-1", "done")
    assert len(log) == 0
    assert log.of("LLM.chat-4", A).documents == ()


def test_other_runs_are_not_seen() -> None:
    log = SpanLog()
    for run, text in (("1", A), ("2", B)):
        log.enter(f"Engine.query-{run}", None, {}, None)
        log.retrieved(f"Engine.query-{run}", [TextNode(text=text)])
    assert [d.text for d in log.of("Engine.query-1", f"{A} {B}").documents] == [A]


def test_retrieval_by_hand_is_kept_for_a_prompt_that_holds_it() -> None:
    log = SpanLog()
    for text in (A, B):
        log.enter("Retriever.retrieve-1", None, {}, None)
        log.retrieved("Retriever.retrieve-1", [TextNode(text=text)])
        log.leave("Retriever.retrieve-1", [])
    assert [d.text for d in log.of(None, f"... {A}").documents] == [A]
    assert log.of(None, "nothing of it").documents == ()


def test_bounded_when_spans_never_end() -> None:
    log = SpanLog()
    for i in range(10_000):
        log.enter(f"Engine.query-{i}", None, {}, None)
        log.retrieved(None, [TextNode(text=f"{A} {i}")])
    assert len(log) <= 8192
    assert log.of(None, f"{A} 17!").documents == ()
    log.drop("Engine.query-9999")
    log.leave("Engine.query-unknown")


class _Unreadable(TextNode):
    def get_content(self, *args: object, **kwargs: object) -> str:
        raise RuntimeError("no text")


def test_a_node_without_text_is_told_once_and_the_others_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    log = SpanLog()
    log.enter("Engine.query-1", None, {}, None)
    with caplog.at_level(logging.WARNING):
        log.retrieved("Engine.query-1", [_Unreadable(text=B), TextNode(text=A), _Unreadable(text=B)])
    assert [d.text for d in log.of("Engine.query-1", A).documents] == [A]
    (told,) = caplog.records
    assert "_Unreadable has no text" in told.getMessage()
