"""Finding documents in a rendered prompt: exact text decides."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_kvcache.prompt.locate import Locator
from rag_kvcache.segment import Document


def found(text: str, *documents: str | Document) -> list[tuple[str, str]]:
    """(the text found, the document it was taken for), in order."""
    known = [d if isinstance(d, Document) else Document(d) for d in documents]
    return [(text[f.start : f.stop], f.document.text) for f in Locator(known).find(text)]


class TestExactText:
    def test_in_prompt_order(self) -> None:
        assert found("x B y A z", "A", "B") == [("B", "B"), ("A", "A")]

    def test_one_word_more_is_another_text(self) -> None:
        assert found("The warranty lasts 2 years", "The warranty lasts two years") == []

    def test_the_same_document_twice(self) -> None:
        assert found("A and A", "A") == [("A", "A"), ("A", "A")]

    def test_given_twice_is_one_document_with_the_first_label(self) -> None:
        locator = Locator([Document("A", id="first"), Document("A", id="second")])
        assert [f.document.id for f in locator.find("A")] == ["first"]

    def test_white_space_inside_counts(self) -> None:
        assert found("a  b", "a b") == []

    def test_case_counts(self) -> None:
        assert found("KETTLE", "kettle") == []


class TestOneInsideAnother:
    def test_the_longer_one_wins(self) -> None:
        outer = "The kettle: boils fast. Costs 30."
        assert found(f"x {outer} y", "boils fast.", outer) == [(outer, outer)]

    def test_of_those_that_start_together_the_longest(self) -> None:
        assert found("ab abc", "ab", "abc") == [("ab", "ab"), ("abc", "abc")]

    def test_the_leftmost_wins_over_a_longer_one(self) -> None:
        assert found("abcdef", "abc", "bcdef") == [("abc", "abc")]

    def test_the_inner_one_is_found_where_it_stands_alone(self) -> None:
        outer = "one two three"
        assert found(f"{outer}\n\ntwo", "two", outer) == [(outer, outer), ("two", "two")]

    def test_side_by_side_without_a_separator(self) -> None:
        assert found("AB", "A", "B") == [("A", "A"), ("B", "B")]


class TestNothingToFind:
    @pytest.mark.parametrize("blank", ["", " ", "\n\t ", "\u3000"])
    def test_blank_documents_stand_nowhere(self, blank: str) -> None:
        assert found("a b\n\n\u3000c", blank) == []
        assert found("a b", blank, "b") == [("b", "b")]

    def test_no_documents(self) -> None:
        assert found("text") == []

    def test_an_empty_prompt(self) -> None:
        assert found("", "A") == []


class TestSpellings:
    @pytest.mark.parametrize("text", ["\n kettle \t", "kettle\n", "\u3000保修期\u3000"])
    def test_stripped_of_outer_white_space(self, text: str) -> None:
        assert found(f"<{text.strip()}>", text) == [(text.strip(), text)]

    def test_unstripped_is_preferred(self) -> None:
        assert found("< kettle >", " kettle ") == [(" kettle ", " kettle ")]

    @pytest.mark.parametrize(
        "text",
        ['It\'s "good"\nnew line', "tab\tand \\ backslash", "café 保修 👍🏽", "it's", 'say "hi"', "\x00\x1b"],
    )
    @pytest.mark.parametrize(
        "spell",
        [repr, str, json.dumps, lambda t: json.dumps(t, ensure_ascii=False), lambda t: repr([t, "other"])],
        ids=["repr", "plain", "json", "json-utf8", "repr-of-list"],
    )
    def test_as_a_formatter_may_print_it(self, text: str, spell: object) -> None:
        printed = f"[Document(page_content={spell(text)})]"  # type: ignore[operator]
        assert [document for _, document in found(printed, text)] == [text]

    def test_an_escaped_spelling_ends_inside_the_quotes(self) -> None:
        text = "a\nb"
        assert found(repr(text), text) == [(r"a\nb", text)]

    def test_a_document_that_looks_like_the_escape_of_another(self) -> None:
        plain, escaped = "a\nb", r"a\nb"
        assert found(f"{escaped} {plain}", escaped, plain) == [(escaped, escaped), (plain, plain)]
        assert found(f"{escaped} {plain}", plain, escaped) == [(escaped, escaped), (plain, plain)]


class TestUnicode:
    @pytest.mark.parametrize("text", ["保修期为两年。", "👩‍👩‍👧 family", "👍🏽", "e\u0301", "𝔘nicode"])
    def test_positions_are_characters_not_bytes(self, text: str) -> None:
        prompt = f"前言 👍 {text} 后记 👩‍👧"
        (hit,) = Locator([Document(text)]).find(prompt)
        assert prompt[hit.start : hit.stop] == text

    def test_no_normalisation(self) -> None:
        assert found("é", "e\u0301") == []

    @pytest.mark.parametrize("documents", [("broken \ud800", "B"), ("B", "broken \ud800")])
    def test_a_lone_surrogate_hides_no_other_document(self, documents: tuple[str, ...]) -> None:
        assert found("A and B", *documents) == [("B", "B")]


words = st.lists(st.sampled_from(["a", "ab", "b", "ba", "\n", " ", "保", "👍"]), min_size=1, max_size=5)
texts = words.map("".join)


@given(st.lists(texts, max_size=4), st.lists(texts, max_size=8))
def test_is_leftmost_longest_without_overlap(documents: list[str], parts: list[str]) -> None:
    prompt = "".join(parts)
    spellings = {s for d in documents for s in _plain_spellings(d)}
    expected, at = [], 0
    while at < len(prompt):
        here = [s for s in spellings if prompt.startswith(s, at)]
        if here:
            expected.append((at, at + max(map(len, here))))
        at = expected[-1][1] if here else at + 1
    got = Locator(Document(d) for d in documents).find(prompt)
    assert [(f.start, f.stop) for f in got] == expected
    for f in got:
        assert prompt[f.start : f.stop] in _plain_spellings(f.document.text)


def _plain_spellings(text: str) -> set[str]:
    return {
        s
        for base in (text, text.strip())
        if base.strip()
        for s in (base, repr(base)[1:-1], json.dumps(base)[1:-1], json.dumps(base, ensure_ascii=False)[1:-1])
    }
