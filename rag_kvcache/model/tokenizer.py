"""The tokenizer as the engine sees it: ids with character offsets, from many threads."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from rag_kvcache.errors import ChatTemplateError, ConfigurationError
from rag_kvcache.keys import TokenIds
from rag_kvcache.model.fingerprint import tokenizer_fingerprint
from rag_kvcache.segment import Reason

Message = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Encoded:
    """Token ids [tokens], and where each token stands in the text.

    starts, ends: character offsets [tokens]; None when they are not known, because of ``without_offsets``.
    """

    ids: TokenIds
    starts: npt.NDArray[np.int64] | None = None
    ends: npt.NDArray[np.int64] | None = None
    without_offsets: Reason = Reason.CONTROL_TOKENS


class PromptTokenizer:
    """A private copy of the user's tokenizer behind a lock.

    Fast tokenizers keep padding, truncation and special-token settings in shared state that every call
    may flip, so one object used by several threads gives wrong ids now and then. The copy is ours alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigurationError(
                f"tokenizer must be a transformers tokenizer, not {type(tokenizer).__name__}"
            )
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = RLock()
        self.fingerprint = tokenizer_fingerprint(self._tokenizer)
        self.limit = int(min(tokenizer.model_max_length, 1 << 30))
        self.has_chat_template = bool(tokenizer.chat_template)
        self._control = _control_tokens(self._tokenizer)

    def encode(self, text: str, *, special: bool) -> Encoded:
        """Ids and offsets of ``text``; ``special`` adds what the tokenizer adds (such as BOS)."""
        with self._lock:
            if not self._tokenizer.is_fast:
                ids = _ids(self._tokenizer(text, add_special_tokens=special)["input_ids"])
                return Encoded(ids, without_offsets=Reason.NO_OFFSETS)
            out = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        offsets = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return Encoded(_ids(out["input_ids"]), offsets[:, 0], offsets[:, 1])

    def control_spellings(self, text: str) -> Iterator[tuple[int, int]]:
        """Character ranges of ``text`` that spell a control token, such as ``<|im_end|>``."""
        return (match.span() for match in self._control.finditer(text))

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """The chat template's text for ``messages``. Raises ChatTemplateError when it refuses them."""
        with self._lock:
            return str(self._apply(messages, add_generation_prompt=generation_prompt, tokenize=False))

    def encode_sanitized(self, messages: Sequence[Message]) -> Encoded:
        """Ids of ``messages`` with control-token spellings inside them as plain text; no offsets."""
        with self._lock:
            out = self._apply(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
            )
        return Encoded(_ids(out))

    def encode_guarded(self, text: str, untrusted: Sequence[tuple[int, int]]) -> Encoded:
        """Ids of plain ``text`` whose control-token spellings at ``untrusted`` are plain text; no offsets.

        Written as a throw-away chat template that prints the trusted pieces itself and takes the others as
        messages, so that transformers' own sanitising decides.
        """
        spellings = [text[start:stop] for start, stop in untrusted]
        # Never printed: tells transformers that these, special or not, are control tokens.
        named = "".join("{{ " + _literal(spelling) + " }}" for spelling in spellings)
        template, at = ["{% if false %}" + named + "{% endif %}"], 0
        for which, (start, stop) in enumerate(untrusted):
            template.append("{{ " + _literal(text[at:start]) + f" }}}}{{{{ messages[{which}]['content'] }}}}")
            at = stop
        template.append("{{ " + _literal(text[at:]) + " }}")
        with self._lock:
            body = self._apply(
                [{"role": "user", "content": spelling} for spelling in spellings],
                chat_template="".join(template),
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
            )
            before, behind = self._added()
        return Encoded(_ids([*before, *body, *behind]))

    def _added(self) -> tuple[list[int], list[int]]:
        """What the tokenizer adds before (BOS) and behind (EOS) a plain text."""
        bare, whole = (list(self._tokenizer("a", add_special_tokens=s)["input_ids"]) for s in (False, True))
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), len(whole))
        return whole[:at], whole[at + len(bare) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens left out."""
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _apply(self, messages: Sequence[Message], **kwargs: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template([dict(m) for m in messages], **kwargs)
        except Exception as e:  # templates raise what they like: jinja's errors, TypeError, ValueError
            raise ChatTemplateError(
                f"the chat template refused these messages ({type(e).__name__}: {e}); "
                "check roles and their order, or pass the prompt as text"
            ) from e


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the spelling of any added token that stands for control, longest first."""
    template = json.dumps(tokenizer.chat_template, default=str)
    named = getattr(tokenizer, "chat_control_tokens", None) or ()
    spellings = sorted(
        (
            t.content
            for t in tokenizer.added_tokens_decoder.values()
            if t.special
            or t.content in named
            or (json.dumps(t.content)[1:-1] in template and not t.content.isspace())
        ),
        key=len,
        reverse=True,
    )
    return re.compile("|".join(map(re.escape, spellings)) or r"(?!)")


def _literal(text: str) -> str:
    """A jinja string literal; jinja reads backslash escapes as Python does, not JSON's surrogate pairs."""
    return json.dumps(text, ensure_ascii=False)


def _ids(ids: Any) -> TokenIds:
    return np.asarray(ids, dtype=np.int64).reshape(-1)
