"""The ids of a read prompt are those of the whole prompt's own tokenisation, whatever stands where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rag_kvcache.errors import EmptyPromptError, RequestError
from rag_kvcache.model.tokenizer import PromptTokenizer
from rag_kvcache.prompt.locate import Locator
from rag_kvcache.prompt.read import ReadPrompt, read
from rag_kvcache.segment import Document
from tests.prompt.tokenizers import TOKENIZERS

FAMILY = "👩‍👩‍👧"
BOUNDARIES = {
    "foo|bar": ("foo", "bar"),
    "bar behind a blank": ("foo ", "bar"),
    " |x": ("foo", " x"),
    "newline pairs": ("foo\n", "\nbar\n"),
    "three newlines": ("foo\n\n", "\nbar"),
    "joined emoji, cut at the joiner": (FAMILY[:1], FAMILY[1:]),
    "joined emoji, cut behind the joiner": (f"a{FAMILY[:2]}", FAMILY[2:]),
    "emoji with a skin tone": ("👍", "🏽 fine"),
    "Chinese": ("退货需要", "在三十天内完成。"),
    "Chinese behind English": ("foo", "保修期"),
    "digits": ("12", "34567"),
    "digits behind a blank": ("12 ", "345"),
    "a combining accent": ("e", "\u0301 fin"),
    "punctuation": ("foo bar.", '" he said'),
    "white space only before": ("   ", "foo"),
    "a replacement character": ("foo", "\ufffdbar"),
    "control characters": ("foo\x00", "\x07bar"),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return TOKENIZERS[request.param]()


def reading(tokenizer: PreTrainedTokenizerBase, prompt: Any, *documents: str) -> ReadPrompt:
    return read(prompt, Locator(Document(d) for d in documents), None, PromptTokenizer(tokenizer), 16)


def raw_chat(tokenizer: PreTrainedTokenizerBase, messages: Any) -> list[int]:
    """What transformers alone makes of a chat."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


class TestBoundaries:
    @pytest.mark.parametrize("boundary", BOUNDARIES)
    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_of_plain_prompts(self, tokenizer: PreTrainedTokenizerBase, boundary: str, which: int) -> None:
        left, right = BOUNDARIES[boundary]
        documents = [(left,), (right,), (left, right)][which]
        text = left + right
        assert reading(tokenizer, text, *documents).ids.tolist() == tokenizer(text).input_ids

    @pytest.mark.parametrize("boundary", BOUNDARIES)
    def test_of_chats(self, tokenizer: PreTrainedTokenizerBase, boundary: str) -> None:
        left, right = BOUNDARIES[boundary]
        chat = [
            {"role": "system", "content": right},
            {"role": "user", "content": left + right},
            {"role": "assistant", "content": right + left},
            {"role": "user", "content": right},
        ]
        assert reading(tokenizer, chat, left, right).ids.tolist() == raw_chat(tokenizer, chat)

    def test_the_messages_are_not_changed(self, tokenizer: PreTrainedTokenizerBase) -> None:
        chat = [{"role": "user", "content": "foo"}]
        reading(tokenizer, chat, "foo")
        assert chat == [{"role": "user", "content": "foo"}]


pieces = st.lists(
    st.one_of(st.sampled_from([p for pair in BOUNDARIES.values() for p in pair]), st.text(max_size=5)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(parts=pieces, data=st.data())
def test_of_any_text(kind: str, parts: list[str], data: st.DataObject) -> None:
    tokenizer, text = TOKENIZERS[kind](), "".join(parts)
    documents = data.draw(st.lists(st.sampled_from(parts), max_size=3))
    try:
        ids = reading(tokenizer, text, *documents).ids.tolist()
    except EmptyPromptError:
        ids = []
    assert ids == tokenizer(text).input_ids


def test_a_prompt_without_a_token_is_a_clear_error(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer("").input_ids:
        assert reading(tokenizer, "").ids.tolist() == tokenizer("").input_ids
    else:
        with pytest.raises(EmptyPromptError):
            reading(tokenizer, "")


@pytest.mark.parametrize("prompt", ["foo \ud83d", [{"role": "user", "content": "foo \ud83d"}]])
def test_half_a_character_is_a_clear_error(tokenizer: PreTrainedTokenizerBase, prompt: Any) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        reading(tokenizer, prompt, "foo")
