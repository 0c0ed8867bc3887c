"""Cutting prompts into segments: no gaps, the right kinds, edges left to the glue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_kvcache.keys import text_digest, tokens_digest
from rag_kvcache.model.tokenizer import Encoded, PromptTokenizer
from rag_kvcache.prompt.cut import Layout, cut
from rag_kvcache.prompt.locate import Locator
from rag_kvcache.prompt.read import ReadPrompt, read
from rag_kvcache.segment import Document, Segment, SegmentKind
from tests.prompt.tokenizers import TOKENIZERS
from tests.tiny import tiny_tokenizer

STATIC, GLUE, DOCUMENT = SegmentKind.STATIC, SegmentKind.GLUE, SegmentKind.DOCUMENT
HISTORY, BLOCK, QUESTION = SegmentKind.HISTORY, SegmentKind.BLOCK, SegmentKind.QUESTION
KETTLE = "The warranty of the kettle lasts two years."
RETURNS = "Return it within 30 days, with the receipt."
SYSTEM = {"role": "system", "content": "You are a helpful shop assistant."}
WORDS = PromptTokenizer(tiny_tokenizer())


def reading(
    prompt: str | Sequence[dict[str, Any]],
    *documents: str,
    question: str | None = None,
    block: int = 16,
    words: PromptTokenizer = WORDS,
) -> ReadPrompt:
    return read(prompt, Locator(Document(d) for d in documents), question, words, block)


def shown(prompt: ReadPrompt, *static: int) -> list[tuple[str, str]]:
    """(kind, text) of the segments."""
    return [(str(s.kind), text_of(prompt, s)) for s in prompt.segments(static)]


def text_of(prompt: ReadPrompt, segment: Segment) -> str:
    return str(tiny_tokenizer().decode(prompt.ids[segment.start : segment.stop].tolist()))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


class TestPlainPrompts:
    def test_documents_with_glue_between_and_the_question_behind(self) -> None:
        prompt = reading(f"Context: {KETTLE}\n\n{RETURNS}\n\nHow long?", KETTLE, RETURNS)
        assert shown(prompt) == [
            ("glue", "Context: "),
            ("document", KETTLE),
            ("glue", "\n\n"),
            ("document", RETURNS),
            ("question", "\n\nHow long?"),
        ]

    def test_the_static_part_comes_first(self) -> None:
        prompt = reading(f"Context:\n{KETTLE}\nHow long?", KETTLE)
        assert prompt.layout.head > 0
        assert shown(prompt, prompt.layout.head) == [
            ("static", "Context:\n"),
            ("document", KETTLE),
            ("question", "\nHow long?"),
        ]

    def test_nothing_known_is_blocks_and_the_last_block_a_question(self) -> None:
        prompt = reading("foo bar " * 40, block=16)
        n = len(prompt.ids)
        segments = prompt.segments()
        assert [s.kind for s in segments] == [BLOCK] * (len(segments) - 1) + [QUESTION]
        assert segments[-1].tokens == 16
        assert [s.stop for s in segments[:-2]] == list(range(16, n - 16, 16))
        assert prompt.layout.head == 0

    def test_a_prompt_of_one_block_is_all_question(self) -> None:
        assert [s.kind for s in reading("foo bar", block=16).segments()] == [QUESTION]

    def test_a_known_question_ends_the_blocks(self) -> None:
        prompt = reading(f"{'foo bar ' * 20}\nHow long? Answer:", question="How long?", block=16)
        *blocks, question = prompt.segments()
        assert {s.kind for s in blocks} == {BLOCK}
        assert text_of(prompt, question) == "How long? Answer:"

    def test_one_document_inside_another_is_part_of_it(self) -> None:
        prompt = reading(f"Context:\n{KETTLE}\n", KETTLE, "two years")
        assert [s.document.text for s in prompt.segments() if s.document] == [KETTLE]

    def test_the_same_document_twice_is_two_segments(self) -> None:
        prompt = reading(f"{KETTLE}\n\n{KETTLE}\n\nHow long?", KETTLE)
        assert [kind for kind, _ in shown(prompt)] == ["document", "glue", "document", "question"]

    def test_an_empty_document_is_nowhere(self) -> None:
        prompt = reading(f"{KETTLE}\n\nHow long?", "", " ", KETTLE)
        assert [kind for kind, _ in shown(prompt)] == ["document", "question"]


class TestQuestion:
    def test_is_looked_for_outside_the_documents(self) -> None:
        text = "How long? Two years."
        prompt = reading(f"Q: How long?\n{text}\nEnd", text, question="How long?")
        assert [kind for kind, _ in shown(prompt)] == ["glue", "question", "document", "question"]

    def test_found_in_documents_only_is_unknown(self) -> None:
        text = "How long? Two years."
        prompt = reading(f"Context:\n{text}\nEnd", text, question="How long?")
        assert prompt.layout.question == prompt.layout.tokens

    def test_is_where_it_stands_last(self) -> None:
        prompt = reading("How long? is often asked.\n" * 3 + "How long? Answer:", question=" How long? ")
        assert shown(prompt)[-1] == ("question", "How long? Answer:")

    @pytest.mark.parametrize("question", [None, "", "  \n", "Not in the prompt?"])
    def test_unknown_begins_behind_the_last_document(self, question: str | None) -> None:
        prompt = reading(f"Context:\n{KETTLE}\nHow long?", KETTLE, question=question)
        assert shown(prompt)[-1] == ("question", "\nHow long?")

    def test_before_the_documents_is_no_static_prompt(self) -> None:
        prompt = reading(f"Context. How long?\n{KETTLE}\nAnswer:", KETTLE, question="How long?")
        kinds = [kind for kind, _ in shown(prompt)]
        assert kinds == ["glue", "question", "document", "question"]
        assert text_of(prompt, prompt.segments()[0]).startswith("Context.")
        assert "How" not in tiny_tokenizer().decode(prompt.ids[: prompt.layout.head].tolist())

    def test_that_overlaps_itself_is_found_outside(self) -> None:
        prompt = reading("aXaXa and Xa\nend", "aXaXa", question="Xa")
        assert prompt.layout.question < prompt.layout.tokens
        assert shown(prompt)[-1][1].endswith("Xa\nend")


class TestChats:
    def test_documents_in_the_question_behind_a_static_system_prompt(self) -> None:
        prompt = reading([SYSTEM, user(f"Context:\n{KETTLE}\n\nHow long?")], KETTLE, question="How long?")
        static, *rest = shown(prompt, prompt.layout.head)
        assert static[1].endswith("<|im_start|>user\nContext:\n")
        assert rest[0] == ("document", KETTLE)
        assert rest[-1][0] == "question"

    def test_documents_in_the_system_prompt(self) -> None:
        system = {"role": "system", "content": f"Use this:\n{KETTLE}\nBe brief."}
        prompt = reading([system, user("How long?")], KETTLE, question="How long?")
        assert [kind for kind, _ in shown(prompt, prompt.layout.head)] == [
            "static",
            "document",
            "glue",
            "question",
        ]
        assert shown(prompt)[-1][1].startswith("How long?")

    def test_history_is_neither_static_nor_question(self) -> None:
        chat = [SYSTEM, user("Hello there"), {"role": "assistant", "content": "Hello!"}]
        chat.append(user(f"Context:\n{KETTLE}\n\nHow long?"))
        prompt = reading(chat, KETTLE)
        segments = prompt.segments([prompt.layout.head])
        kinds = [s.kind for s in segments]
        assert kinds[0] == STATIC
        assert HISTORY in kinds
        assert kinds[-2:] == [DOCUMENT, QUESTION]
        assert "Hello there" not in text_of(prompt, segments[0])
        history = "".join(text_of(prompt, s) for s in segments if s.kind == HISTORY)
        assert history.startswith("Hello there")
        assert "Hello!" in history

    def test_history_is_cut_at_multiples_so_that_a_longer_one_begins_alike(self) -> None:
        chat = [SYSTEM]
        cuts = []
        for n in range(6):
            chat.append(user(f"Question {n}: how long?"))
            prompt = reading(chat, block=16)
            cuts.append([s for s in prompt.segments([prompt.layout.head]) if s.kind == HISTORY])
            chat.append({"role": "assistant", "content": f"Answer {n}: the warranty lasts two years."})
        assert cuts[0] == []
        for shorter, longer in pairwise(cuts):
            assert all(s.stop % 16 == 0 for s in shorter[:-1])
            assert longer[: max(0, len(shorter) - 1)] == shorter[:-1]  # the last one may be a part of a block

    def test_a_document_in_an_earlier_turn_is_a_document(self) -> None:
        chat = [SYSTEM, user(f"Context:\n{KETTLE}\n\nHow long?"), {"role": "assistant", "content": "2"}]
        chat.append(user("And shipping?"))
        prompt = reading(chat, KETTLE, question="And shipping?")
        kinds = [s.kind for s in prompt.segments([prompt.layout.head])]
        assert kinds.index(DOCUMENT) < kinds.index(QUESTION)
        assert kinds.count(DOCUMENT) == 1
        assert kinds[-1] == QUESTION

    def test_a_chat_without_documents_keeps_its_system_prompt_apart(self) -> None:
        prompt = reading([SYSTEM, user("How long?")], question="How long?")
        assert shown(prompt)[0][0] == "glue"
        assert shown(prompt)[-1][1].startswith("How long?")
        assert shown(prompt, prompt.layout.head)[0][0] == "static"


class TestEdges:
    def test_a_token_that_straddles_the_edge_is_glue(self) -> None:
        prompt = reading("The warranty lasts two years.", "warranty lasts two")
        assert shown(prompt) == [
            ("glue", "The warranty"),  # " warranty" is one token
            ("document", " lasts two"),
            ("question", " years."),
        ]

    def test_all_whole_tokens_of_a_document_are_its_own(self) -> None:
        prompt = reading(f"x{KETTLE}y", KETTLE)
        ((start, stop, _),) = prompt.layout.documents
        assert prompt.encoded.starts is not None
        assert prompt.encoded.ends is not None
        inside = (prompt.encoded.starts >= 1) & (prompt.encoded.ends <= 1 + len(KETTLE))
        assert inside.nonzero()[0].tolist() == list(range(start, stop))

    def test_a_document_without_a_token_of_its_own_is_glue(self) -> None:
        prompt = reading(f"foo bar\n{KETTLE}\n", "ba", KETTLE)
        assert [d.text for _, _, d in prompt.layout.documents] == [KETTLE]

    def test_digests_name_texts_and_tokens(self) -> None:
        prompt = reading(f"Context:\n{KETTLE}\nHow long?", KETTLE)
        for s in prompt.segments([prompt.layout.head]):
            own = tokens_digest(prompt.ids[s.start : s.stop])
            assert s.text_digest == (text_digest(s.document.text) if s.document else own)


def check_partition(segments: Sequence[Segment], tokens: int) -> None:
    assert [s.start for s in segments] == [0, *(s.stop for s in segments)][: len(segments)]
    assert segments[-1].stop == tokens
    assert all(s.tokens > 0 for s in segments)
    assert all((s.document is not None) == (s.kind == DOCUMENT) for s in segments)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout, sensible or not."""
    n = draw(st.integers(1, 80))
    place = st.integers(0, n)
    edges = sorted(draw(st.lists(place, max_size=8, unique=True)))
    documents = tuple((a, b, Document(f"{a}")) for a, b in zip(edges[::2], edges[1::2], strict=False))
    opening, turn = sorted((draw(place), draw(place)))
    first = documents[0][0] if documents else n
    head = draw(st.integers(0, first))
    return Layout(n, head, opening, turn, draw(place), documents)


@given(layouts(), st.lists(st.integers(1, 90), max_size=3, unique=True).map(sorted), st.integers(8, 20))
def test_any_layout_is_cut_without_gaps(layout: Layout, beginnings: list[int], block: int) -> None:
    ids = np.arange(layout.tokens, dtype=np.int64)
    segments = cut(Encoded(ids, ids, ids + 1), layout, beginnings, block)
    wanted = sorted({min(b, layout.tokens) for b in beginnings})
    static = max(wanted, default=0)
    assert [s.stop for s in segments if s.kind == STATIC] == wanted
    check_partition(segments, layout.tokens)
    placed = [(s.start, s.stop, s.document) for s in segments if s.kind == DOCUMENT]
    assert placed == [d for d in layout.documents if d[0] >= static]
    for s in segments:
        if s.kind in (HISTORY, BLOCK):
            assert s.tokens <= block
            assert s.start // block == (s.stop - 1) // block
        if s.kind == HISTORY:
            assert s.stop <= layout.turn
    if layout.question >= static:
        stored = [
            s for s in segments if s.kind in (GLUE, BLOCK) and s.start >= max(layout.question, layout.turn)
        ]
        assert stored == []  # from the question on nothing but documents


cuts = st.lists(st.integers(1, 90), max_size=3, unique=True).map(sorted)
pieces = st.lists(
    st.sampled_from([KETTLE, RETURNS, "\n", "\n\n", " ", "foo", "|", "3", "How long?", "退货", "👩‍👧", ". "]),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(parts=pieces, before=pieces, static=cuts, chat=st.booleans())
def test_any_prompt_is_cut_without_gaps(
    kind: str, parts: list[str], before: list[str], static: list[int], chat: bool
) -> None:
    content = "".join(parts)
    prompt: Any = content
    if chat:
        prompt = [SYSTEM, user("".join(before)), {"role": "assistant", "content": "Two."}, user(content)]
    words = PROMPT_TOKENIZERS[kind]
    known = (KETTLE, RETURNS, "退货", "foo")
    got = reading(prompt, *known, question="How long?", block=8, words=words)
    segments = got.segments(static)
    check_partition(segments, len(got.ids))
    assert got.encoded.starts is not None
    assert got.encoded.ends is not None
    for s in segments:
        if s.document is not None:
            rendered = words.render(prompt) if chat else prompt
            start, stop = int(got.encoded.starts[s.start]), int(got.encoded.ends[s.stop - 1])
            assert rendered[start:stop] in s.document.text


PROMPT_TOKENIZERS = {name: PromptTokenizer(make()) for name, make in TOKENIZERS.items()}
