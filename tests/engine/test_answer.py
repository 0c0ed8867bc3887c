"""From ids to text, in pieces that may be shown."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rag_kvcache.engine.answer import AnswerText
from tests.tiny import tiny_tokenizer


def spelled(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i) for i in ids)


def as_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def run(answer: AnswerText, ids: Sequence[int]) -> list[str]:
    pieces = []
    for token in ids:
        pieces.append(answer.push(token))
        if answer.stopped:
            break
    return [*pieces, answer.close()]


@given(
    st.lists(st.integers(0, 3), max_size=30), st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3)
)
def test_the_pieces_are_the_text_before_the_first_stop_string(ids: list[int], stop: list[str]) -> None:
    answer = AnswerText(spelled, stop)
    pieces = run(answer, ids)
    whole = spelled(answer.token_ids)
    cuts = [at for s in stop if (at := whole.find(s)) >= 0]
    assert "".join(pieces) == answer.text == (whole[: min(cuts)] if cuts else whole)
    assert answer.stopped is bool(cuts)


@given(st.lists(st.integers(0, 3), max_size=30), st.text("abcd", min_size=2, max_size=4))
def test_what_was_shown_is_never_taken_back(ids: list[int], stop: str) -> None:
    answer = AnswerText(spelled, [stop])
    shown = ""
    for token in ids:
        shown += answer.push(token)
        assert stop not in shown
        if answer.stopped:
            break
    assert answer.text == shown or not answer.stopped


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    answer = AnswerText(as_bytes, [])
    pieces = run(answer, "a期\U0001f600b".encode())
    assert [p for p in pieces if p] == ["a", "期", "\U0001f600", "b"]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    answer = AnswerText(as_bytes, [])
    assert "".join(run(answer, "a期".encode()[:-1])) == "a�"


def test_a_stop_string_across_tokens_is_held_back_until_it_is_none() -> None:
    answer = AnswerText(spelled, ["abc"])
    assert [answer.push(i) for i in (3, 0, 1, 3)] == ["d", "", "", "abd"]


def test_pieces_of_a_real_tokenizer_join_to_its_own_decoding() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("The warranty: 保修期为两年。 \U0001f468‍\U0001f469 ok")["input_ids"]
    answer = AnswerText(lambda i: tokenizer.decode(list(i), skip_special_tokens=True), [])
    assert "".join(run(answer, ids)) == tokenizer.decode(ids)
