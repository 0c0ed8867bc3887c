"""What both models share: their fields, the engine behind them, and how they are made."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.prompt_values import PromptValue
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from langchain_rag_kvcache.call import ALIASES, FIELDS, Call, make_call, normalised
from langchain_rag_kvcache.documents import to_document
from langchain_rag_kvcache.link import Candidates, Link
from langchain_rag_kvcache.messages import to_chat
from langchain_rag_kvcache.retrieved import retrieved_documents
from langchain_rag_kvcache.template import slot_of, with_slot
from rag_kvcache.errors import ConfigurationError
from rag_kvcache.report import Generation, WarmReport
from rag_kvcache.settings import Reuse, Settings

if TYPE_CHECKING:
    from rag_kvcache.engine import Engine

_PROVIDER = "rag_kvcache"

# For the models themselves: their LangChain base class would override it here. A misspelt argument is an
# error, and a name may begin with "model_".
STRICT = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())


class EngineBacked(BaseModel):
    """Fields and methods of a LangChain model that generates with a ``rag_kvcache.Engine``."""

    model_config = STRICT

    engine: Any = Field(exclude=True, repr=False)
    """The ``rag_kvcache.Engine``. Copies of this model share it; it is never serialised."""

    model_id: str | None = None
    """The model's name in results and traces; the engine's name for it when None."""

    max_new_tokens: int | None = Field(
        default=None, gt=0, validation_alias=AliasChoices("max_new_tokens", "max_tokens")
    )
    """Longest answer in tokens; the engine's setting when None."""

    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy, more samples; the model's own generation config decides when None."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the most likely tokens that together have this probability."""

    seed: int | None = None
    """Makes sampling repeatable."""

    stop: list[str] | None = Field(default=None, validation_alias=AliasChoices("stop", "stop_sequences"))
    """Texts that end an answer, for calls that do not name their own."""

    tenant: str | None = Field(default=None, min_length=1)
    """Whose cache to use; the engine's setting when None."""

    reuse: Reuse | None = None
    """"exact", "gated", "always" or "off"; the engine's setting when None."""

    generate_kwargs: dict[str, Any] | None = None
    """Further fields of transformers' ``GenerationConfig``, such as ``repetition_penalty``."""

    @field_validator("engine")
    @classmethod
    def _is_engine(cls, engine: Any) -> Any:
        if not callable(getattr(engine, "agenerate", None)):
            raise ValueError(
                "engine must be a rag_kvcache.Engine; to load a model by name use from_model_id(name)"
            )
        return engine

    @model_validator(mode="after")
    def _link_to_retrievers(self) -> Self:
        retrieved_documents()
        return self

    # ------------------------------------------------------------------ making one

    @classmethod
    def from_model_id(
        cls,
        model_id: str | None = None,
        task: str | None = "text-generation",
        backend: str = "default",
        device: int | str | None = None,
        device_map: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        pipeline_kwargs: Mapping[str, Any] | None = None,
        batch_size: int = 4,
        *,
        engine: Engine | None = None,
        dtype: Any = None,
        gguf_file: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool | None = None,
        tokenizer: Any = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> Self:
        """Load a model, with the arguments of ``HuggingFacePipeline.from_model_id``.

        model_id: hub id, local folder, or "demo". With ``engine``, only the name to show.
        task, backend: "text-generation" and "default".
        device: -1 the CPU, n the n-th GPU, or a torch device name. ``device_map``: as in transformers.
        model_kwargs: for the model's ``from_pretrained``.
        pipeline_kwargs: generation options, such as max_new_tokens, temperature, do_sample.
        batch_size: accepted for compatibility. Prompts of a batch are answered one by one, in order.
        engine: use this engine instead of loading a model.
        settings, options: settings of the engine (``max_bytes``, ``levels``, ...), fields of this class
            (``tenant``, ``temperature``, ...), and LangChain's own (``callbacks``, ``tags``, ...).

        Raises ConfigurationError for what cannot be honoured.
        """
        # Only here, for it loads torch.
        from langchain_rag_kvcache.construct import (
            SHARED,
            check_generate_kwargs,
            check_task,
            load_engine,
            split_options,
        )

        check_task(task, backend, batch_size)
        fields, overrides = split_options(options, pipeline_kwargs, cls.model_fields.keys() - {"engine"})
        source = {
            "revision": revision,
            "trust_remote_code": trust_remote_code,
            "tokenizer": tokenizer,
            "tokenizer_kwargs": tokenizer_kwargs,
            "settings": settings,
        }
        if engine is not None:
            overrides = {name: value for name, value in overrides.items() if name not in SHARED}
            loading = {**source, **overrides, "device": device, "device_map": device_map, "dtype": dtype}
            loading |= {"gguf_file": gguf_file, "model_kwargs": model_kwargs}
            wrong = sorted(name for name, value in loading.items() if value is not None)
            if wrong:
                raise ConfigurationError(
                    f"{', '.join(wrong)} cannot change an engine that exists: leave engine= out, or make "
                    "the engine with them"
                )
        elif model_id is None:
            raise ConfigurationError("model_id is missing: name a model, or give engine=")
        else:
            engine = load_engine(
                model_id,
                device=device,
                device_map=device_map,
                dtype=dtype,
                gguf_file=gguf_file,
                model_kwargs=model_kwargs,
                source=source,
                settings=overrides,
            )
        check_generate_kwargs(fields.get("generate_kwargs"), engine)
        return cls(engine=engine, model_id=model_id, **fields)

    # ------------------------------------------------------------------ the cache

    def warm(
        self,
        documents: Iterable[Any],
        prompt: Any = None,
        *,
        variable: str = "context",
        tenant: str | None = None,
        **values: Any,
    ) -> WarmReport:
        """Build the documents' caches before the first question.

        documents: LangChain Documents or strings.
        prompt: the chain's prompt template. Without one, ``engine.answer``'s own prompt.
        variable: the template's variable that holds the documents.
        values: template variables that have the same value in every request.
        """
        found = [to_document(document) for document in documents]
        tenant = tenant or self.tenant
        arguments: dict[str, Any] = {}
        if prompt is not None:
            rendered = self._engine_prompt(with_slot(prompt, variable, values))
            arguments = {"prompt": rendered, "slot": slot_of(variable)}
        report: WarmReport = self.engine.warm(found, tenant=tenant, **arguments)
        return report

    def close(self) -> None:
        """Close the engine, also for all models that share it."""
        self.engine.close()

    @abstractmethod
    def _engine_prompt(self, value: PromptValue) -> str | list[dict[str, Any]]:
        """A prompt as this kind of model hands it to the engine."""

    # ------------------------------------------------------------------ one call

    def _call(self, stop: Sequence[str] | str | None, bound: Mapping[str, Any]) -> Call:
        own = {name: getattr(self, name) for name in (*FIELDS, "stop", "generate_kwargs")}
        return make_call(own, stop, bound)

    def _engine_arguments(self, call: Call, found: Candidates) -> dict[str, Any]:
        """Keyword arguments of the engine, after it was told of the documents retrieved."""
        if found.documents and found.source is not Link.GIVEN:
            self.engine.remember(found.documents, tenant=call.engine["tenant"])
        question = call.engine["question"] or found.question
        return {**call.engine, "question": question, "documents": found.documents}

    def _configured(self, bound: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """A copy of this model with the fields that a call binds, and what else it binds.

        LangChain's cache for text models looks at fields only: bound arguments must become fields, or
        one call would be given another's answer.
        """
        given = normalised(bound)
        changes = {name: given.pop(name) for name in (*FIELDS, "stop") if name in given}
        if "generate_kwargs" in given:
            changes["generate_kwargs"] = {**(self.generate_kwargs or {}), **given.pop("generate_kwargs")}
        return (self.model_copy(update=changes) if changes else self), given

    # ------------------------------------------------------------------ what LangChain asks

    @property
    def model_name(self) -> str:
        """The model's name in results and traces."""
        return self.model_id or self.engine.model_name or type(self.engine.model).__name__

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that an answer depends on, so that LangChain's cache never mixes two models."""
        settings = self.engine.settings
        return {
            "model": self.model_name,
            "fingerprint": _fingerprint(self.engine),
            "dtype": self.engine.dtype,
            "max_new_tokens": self.max_new_tokens or settings.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "default_stop": self.stop,
            "tenant": self.tenant or settings.tenant,
            "reuse": self.reuse or settings.reuse,
            "generate_kwargs": dict(sorted((self.generate_kwargs or {}).items())),
            "generation_config": _generation_config(self.engine),
            "settings": settings.model_dump(mode="json", exclude={"max_new_tokens", "tenant", "reuse"}),
        }

    def _langsmith(
        self, kind: Literal["chat", "llm"], stop: Any, bound: Mapping[str, Any]
    ) -> LangSmithParams:
        given = {ALIASES.get(name, name): value for name, value in bound.items() if value is not None}
        params = LangSmithParams(
            ls_provider=_PROVIDER,
            ls_model_type=kind,
            ls_model_name=str(given.get("model") or self.model_name),
            ls_max_tokens=int(
                given.get("max_new_tokens") or self.max_new_tokens or self.engine.settings.max_new_tokens
            ),
        )
        temperature = given.get("temperature", self.temperature)
        if temperature is not None:
            params["ls_temperature"] = float(temperature)
        if stop or self.stop:
            params["ls_stop"] = list(stop or self.stop or ())
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """The ids of a text's tokens, special tokens included."""
        own = getattr(self, "custom_get_token_ids", None)
        ids = own(text) if own is not None else self.engine.tokenizer(text)["input_ids"]
        return [int(i) for i in ids]

    def get_num_tokens(self, text: str) -> int:
        """The number of tokens in a text."""
        own = getattr(self, "custom_get_token_ids", None)
        return len(own(text)) if own is not None else int(self.engine.count_tokens(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        """The number of tokens in the messages as the model's chat template writes them."""
        if tools:
            raise ConfigurationError("tools are not supported yet: leave tools out")
        return int(self.engine.count_tokens(to_chat(messages)))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the engine."""
        return super().__deepcopy__({**(memo or {}), id(self.engine): self.engine})


def usage_of(generation: Generation) -> UsageMetadata:
    """Token counts in LangChain's words."""
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details={"cache_read": usage.cached_tokens},
    )


def report_of(generation: Generation, found: Candidates) -> dict[str, Any]:
    """The engine's report as plain types, with the way that the documents were linked."""
    return {**generation.report.to_dict(), "link": str(found.link(generation.report))}


def _fingerprint(engine: Any) -> str | None:
    fingerprint = getattr(engine, "fingerprint", None)
    return fingerprint.hex() if isinstance(fingerprint, bytes) else fingerprint


def _generation_config(engine: Any) -> dict[str, Any]:
    config = engine.model.generation_config.to_diff_dict()
    return {name: config[name] for name in sorted(config) if name != "transformers_version"}
