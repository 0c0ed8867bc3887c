"""The tokenizer: the user's object untouched, right from many threads."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_python import PreTrainedTokenizer

from rag_kvcache.errors import ConfigurationError
from rag_kvcache.model.fingerprint import tokenizer_fingerprint
from rag_kvcache.model.tokenizer import PromptTokenizer
from tests.prompt.tokenizers import TOKENIZERS
from tests.tiny import tiny_tokenizer

CHAT = [{"role": "user", "content": "Is it <|im_end|> free?"}]


class SlowTokenizer(PreTrainedTokenizer):
    """A tokenizer of characters, in Python, which knows no offsets."""

    def __init__(self, **kwargs: Any) -> None:
        self._characters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ?.")}
        super().__init__(unk_token="?", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._characters)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._characters)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._characters.get(token, self._characters["?"])

    def _convert_id_to_token(self, index: int) -> str:
        return list(self._characters)[index]


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return TOKENIZERS[request.param]()


def state(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """All that a tokenizer could be changed in."""
    own = {k: repr(v) for k, v in vars(tokenizer).items() if k != "_tokenizer"}
    backend = tokenizer.backend_tokenizer
    return own | {"backend": backend.to_str(), "splits": backend.encode_special_tokens}


class TestTheUsersObject:
    def test_is_left_as_it_was(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokenizer("a b", truncation=True, max_length=1)  # a state of its own, as the user left it
        before = state(tokenizer)
        words = PromptTokenizer(tokenizer)
        words.encode("foo bar", special=True)
        words.render(CHAT)
        words.encode_sanitized(CHAT)
        words.encode_guarded("foo<|im_end|>", [(3, 13)])
        words.decode([5, 6])
        assert state(tokenizer) == before
        tokenizer("a b")  # puts truncation off again for the other tests

    def test_may_change_without_changing_ours(self) -> None:
        mine = copy.deepcopy(tiny_tokenizer())
        words = PromptTokenizer(mine)
        expected = words.render(CHAT)
        mine.chat_template = "other"
        mine.add_tokens(["foo bar"])
        mine("a b", truncation=True, max_length=1)
        assert words.render(CHAT) == expected
        assert words.encode("foo bar", special=False).ids.tolist() == tiny_tokenizer()("foo bar").input_ids

    @pytest.mark.parametrize("wrong", [None, "gpt2", tiny_tokenizer().backend_tokenizer])
    def test_must_be_a_tokenizer_of_transformers(self, wrong: Any) -> None:
        with pytest.raises(ConfigurationError, match=type(wrong).__name__):
            PromptTokenizer(wrong)


class TestEncoding:
    def test_of_ids_and_offsets(self, tokenizer: PreTrainedTokenizerBase) -> None:
        text = "The warranty lasts. 保修 👩‍👧"
        got = PromptTokenizer(tokenizer).encode(text, special=False)
        assert got.ids.tolist() == tokenizer(text, add_special_tokens=False).input_ids
        assert got.starts is not None
        assert got.ends is not None
        assert got.starts[0] == 0
        assert got.ends[-1] == len(text)
        assert (got.starts <= got.ends).all()

    def test_of_nothing(self) -> None:
        got = PromptTokenizer(tiny_tokenizer()).encode("", special=False)
        assert got.ids.shape == (0,)
        assert got.starts is not None

    def test_adds_special_tokens_only_when_asked(self, tokenizer: PreTrainedTokenizerBase) -> None:
        words = PromptTokenizer(tokenizer)
        assert words.encode("foo", special=True).ids.tolist() == tokenizer("foo").input_ids
        bare = tokenizer("foo", add_special_tokens=False).input_ids
        assert words.encode("foo", special=False).ids.tolist() == bare

    def test_is_never_truncated(self) -> None:
        mine = copy.deepcopy(tiny_tokenizer())
        mine.model_max_length = 4
        text = "foo bar " * 50
        mine("foo bar", truncation=True, max_length=2)
        assert PromptTokenizer(mine).encode(text, special=True).ids.tolist() == mine(text).input_ids
        assert PromptTokenizer(mine).limit == 4

    def test_of_a_slow_tokenizer_has_no_offsets(self) -> None:
        got = PromptTokenizer(SlowTokenizer()).encode("foo bar", special=True)
        assert got.ids.tolist() == SlowTokenizer()("foo bar").input_ids
        assert got.starts is None
        assert got.ends is None


class TestDecoding:
    def test_leaves_special_tokens_out(self) -> None:
        ids = tiny_tokenizer()("foo<|im_end|> bar").input_ids
        assert PromptTokenizer(tiny_tokenizer()).decode(ids) == "foo bar"

    def test_takes_any_sequence(self) -> None:
        assert PromptTokenizer(tiny_tokenizer()).decode(()) == ""


class TestControlSpellings:
    @pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "x" * 1000 + "<|endoftext|>"])
    def test_are_found(self, text: str) -> None:
        ((start, stop),) = PromptTokenizer(tiny_tokenizer()).control_spellings(text)
        assert text[start:stop] in tiny_tokenizer().all_special_tokens

    @pytest.mark.parametrize("text", ["", "im_end", "<|im_end", "< |im_end|>", "<|IM_END|>"])
    def test_are_exact(self, text: str) -> None:
        assert list(PromptTokenizer(tiny_tokenizer()).control_spellings(text)) == []

    def test_of_a_tokenizer_without_any(self) -> None:
        slow = SlowTokenizer()
        assert list(PromptTokenizer(slow).control_spellings("<|im_end|>")) == []


class TestThreads:
    def test_sixteen_with_fifty_encodings_each_are_all_right(self) -> None:
        """Sanitising flips a switch of the tokenizer that ordinary encoding reads."""
        words = PromptTokenizer(tiny_tokenizer())
        text = "Is it <|im_end|> free? 保修"
        expected = (
            words.encode(text, special=False).ids.tolist(),
            words.encode_sanitized(CHAT).ids.tolist(),
            words.encode_guarded(text, [(6, 16)]).ids.tolist(),
            words.render(CHAT),
        )
        assert len({json.dumps(e) for e in expected}) == 4

        def work(n: int) -> list[int]:
            wrong = []
            for m in range(50):
                which = (n + m) % 4
                got: Any = (
                    lambda: words.encode(text, special=False).ids.tolist(),
                    lambda: words.encode_sanitized(CHAT).ids.tolist(),
                    lambda: words.encode_guarded(text, [(6, 16)]).ids.tolist(),
                    lambda: words.render(CHAT),
                )[which]()
                if got != expected[which]:
                    wrong.append(which)
            return wrong

        with ThreadPoolExecutor(16) as pool:
            assert [w for wrong in pool.map(work, range(16)) for w in wrong] == []

    def test_two_wrappers_of_one_tokenizer_do_not_meet(self) -> None:
        one, two = PromptTokenizer(tiny_tokenizer()), PromptTokenizer(tiny_tokenizer())
        text = "a<|im_end|>b"
        plain = one.encode(text, special=False).ids.tolist()
        guarded = two.encode_guarded(text, [(1, 11)]).ids.tolist()

        def work(n: int) -> bool:
            if n % 2:
                return one.encode(text, special=False).ids.tolist() == plain
            return two.encode_guarded(text, [(1, 11)]).ids.tolist() == guarded

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(400)))


class TestFingerprint:
    def test_is_equal_for_equal_tokenizers(self) -> None:
        assert tokenizer_fingerprint(copy.deepcopy(tiny_tokenizer())) == tokenizer_fingerprint(
            tiny_tokenizer()
        )

    def test_tells_all_kinds_apart(self) -> None:
        assert len({tokenizer_fingerprint(make()) for make in TOKENIZERS.values()}) == len(TOKENIZERS)

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: setattr(t, "chat_template", t.chat_template + " "),
            lambda t: setattr(t, "chat_template", None),
            lambda t: t.add_tokens(["foo bar"]),
            lambda t: t.add_special_tokens({"bos_token": "<|endoftext|>"}),
        ],
        ids=["template", "no template", "vocabulary", "special tokens"],
    )
    def test_changes_with(self, change: Any) -> None:
        other = copy.deepcopy(tiny_tokenizer())
        before = tokenizer_fingerprint(other)
        change(other)
        assert tokenizer_fingerprint(other) != before

    def test_changes_with_the_normaliser_and_the_pre_tokenizer(self) -> None:
        other = copy.deepcopy(tiny_tokenizer())
        seen = {tokenizer_fingerprint(other)}
        other.backend_tokenizer.normalizer = normalizers.NFC()
        seen.add(tokenizer_fingerprint(other))
        other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        seen.add(tokenizer_fingerprint(other))
        assert len(seen) == 3

    def test_does_not_change_with_what_a_call_left_behind(self) -> None:
        other = copy.deepcopy(tiny_tokenizer())
        before = tokenizer_fingerprint(other)
        other(["a", "a b c"], padding=True, truncation=True, max_length=2)
        assert tokenizer_fingerprint(other) == before

    def test_of_a_slow_tokenizer_is_that_of_its_vocabulary(self) -> None:
        slow, other = SlowTokenizer(), SlowTokenizer()
        assert tokenizer_fingerprint(slow) == tokenizer_fingerprint(other)
        other._characters["ß"] = 99
        assert tokenizer_fingerprint(slow) != tokenizer_fingerprint(other)
