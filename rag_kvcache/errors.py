"""Every exception this package raises on purpose.

    RagKVCacheError
    ├── ConfigurationError (ValueError)      wrong settings: raised at construction
    │   ├── ModelNotFoundError               no such hub id, folder or file
    │   ├── UnsupportedModelError            a model this package cannot serve at all
    │   └── MissingExtraError (ImportError)  an optional package is not installed
    ├── RequestError                         wrong request: nothing was generated or stored
    │   ├── InvalidTypeError                 an argument of the wrong type
    │   ├── EmptyPromptError                 no tokens to start from
    │   ├── PromptTooLongError               prompt + new tokens exceed the context window
    │   └── ChatTemplateError                the tokenizer's chat template refused the messages
    └── EngineClosedError (RuntimeError)     used after close()

A fault of the cache itself (a corrupt entry, a full tier) is never an exception: the request falls
back to prefill and its report says so.

A RequestError is no ValueError: frameworks catch that one around an LLM call and carry on (LlamaIndex's
refine takes it for a parse error), so a prompt that is too long would silently become a wrong answer.
"""

from __future__ import annotations


class RagKVCacheError(Exception):
    """Base of all exceptions raised by rag_kvcache."""


class ConfigurationError(RagKVCacheError, ValueError):
    """A setting is wrong. The message says which one and what to do."""


class ModelNotFoundError(ConfigurationError):
    """The model could not be found or read under the given name."""


class UnsupportedModelError(ConfigurationError):
    """The model cannot be served, cached or not (for instance an encoder-decoder)."""


class MissingExtraError(ConfigurationError, ImportError):
    """An optional dependency is missing. The message names the extra that installs it."""

    def __init__(self, package: str, extra: str, *, install: str | None = None) -> None:
        command = install or f"pip install 'rag-kvcache[{extra}]'"
        super().__init__(f"{package} is not installed: {command}")
        self.package = package
        self.extra = extra


class RequestError(RagKVCacheError):
    """A request cannot be served. Nothing was generated and nothing was stored."""


class InvalidTypeError(RequestError):
    """An argument of a request has the wrong type."""


class EmptyPromptError(RequestError):
    """The prompt has no text, hence no token to predict from."""


class PromptTooLongError(RequestError):
    """The prompt and the tokens asked for do not fit into the model's context window."""

    def __init__(self, prompt_tokens: int, max_new_tokens: int, window: int) -> None:
        super().__init__(
            f"prompt of {prompt_tokens} tokens + max_new_tokens={max_new_tokens} exceed the model's "
            f"context window of {window} tokens: retrieve fewer documents or ask for fewer tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.window = window


class ChatTemplateError(RequestError):
    """The tokenizer has no chat template, or its template refused these messages."""


class EngineClosedError(RagKVCacheError, RuntimeError):
    """The engine was used after ``close()``."""

    def __init__(self) -> None:
        super().__init__("this engine is closed: make a new one")
