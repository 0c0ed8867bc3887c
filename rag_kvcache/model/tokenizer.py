"""The tokenizer as the engine sees it: ids with character offsets, from many threads."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from rag_kvcache.errors import ChatTemplateError, ConfigurationError
from rag_kvcache.keys import TokenIds
from rag_kvcache.model.fingerprint import tokenizer_fingerprint

Message = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Encoded:
    """Token ids [tokens], and where each token stands in the text.

    starts, ends: character offsets [tokens]; None when the tokenizer cannot tell them.
    """

    ids: TokenIds
    starts: npt.NDArray[np.int64] | None = None
    ends: npt.NDArray[np.int64] | None = None


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
                return Encoded(_ids(self._tokenizer(text, add_special_tokens=special)["input_ids"]))
            out = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        offsets = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return Encoded(_ids(out["input_ids"]), offsets[:, 0], offsets[:, 1])

    def spells_control_tokens(self, text: str) -> bool:
        """Whether ``text`` contains the spelling of a control token, such as ``<|im_end|>``."""
        return self._control.search(text) is not None

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
        """Ids of plain ``text`` whose character ranges ``untrusted`` may not yield control tokens.

        Written as a throw-away chat template that prints the trusted pieces itself and takes the others as
        messages, so that transformers' own sanitising decides.
        """
        template: list[str] = []
        messages: list[dict[str, str]] = []
        at = 0
        for start, stop in untrusted:
            template.append("{{ " + _literal(text[at:start]) + " }}")
            template.append(f"{{{{ messages[{len(messages)}]['content'] }}}}")
            messages.append({"role": "user", "content": text[start:stop]})
            at = stop
        template.append("{{ " + _literal(text[at:]) + " }}")
        with self._lock:
            body = self._apply(
                messages,
                chat_template="".join(template),
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
            )
            bos = self._tokenizer("")["input_ids"]
        return Encoded(_ids([*bos, *body]))

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
    spellings = sorted(
        (
            t.content
            for t in tokenizer.added_tokens_decoder.values()
            if not t.content.isspace() and (t.special or json.dumps(t.content)[1:-1] in template)
        ),
        key=len,
        reverse=True,
    )
    return re.compile("|".join(map(re.escape, spellings)) or r"(?!)")


def _literal(text: str) -> str:
    """A jinja string literal; jinja reads backslash escapes as Python does."""
    return json.dumps(text, ensure_ascii=True)


def _ids(ids: Any) -> TokenIds:
    return np.asarray(ids, dtype=np.int64).reshape(-1)
