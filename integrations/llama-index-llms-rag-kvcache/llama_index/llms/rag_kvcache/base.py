"""``RAGKVCacheLLM``: a local Hugging Face model as a LlamaIndex LLM, with KV-cache reuse."""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.types import BaseOutputParser, PydanticProgramMode
from llama_index.llms.rag_kvcache import loading, responses
from llama_index.llms.rag_kvcache.messages import ChatTemplateText, as_dicts, as_text
from llama_index.llms.rag_kvcache.nodes import as_documents
from llama_index.llms.rag_kvcache.retrieved import SpanLog, register, retrieved_for, stands_in

from rag_kvcache.errors import ConfigurationError, InvalidTypeError, RequestError
from rag_kvcache.report import Chunk, Generation, WarmReport
from rag_kvcache.segment import Document
from rag_kvcache.settings import Reuse, Settings

if TYPE_CHECKING:
    from rag_kvcache.engine import Engine

_log = logging.getLogger(__name__)

Prompt = str | list[dict[str, Any]]

# Arguments of a call. The first ones go to the engine as they are.
_TO_ENGINE = ("temperature", "top_p", "seed", "question")
_PER_CALL = (
    *_TO_ENGINE,
    "max_new_tokens",
    "max_tokens",
    "stop",
    "tenant",
    "reuse",
    "documents",
    "generate_kwargs",
)
_SLOT = "{rag_kvcache_context}"
_SECRETS = ("token", "use_auth_token")


@dataclass(frozen=True)
class _Request:
    """One call, ready for the engine. documents_from names the link, should a document be found."""

    prompt: Prompt
    arguments: dict[str, Any]
    documents_from: str


class RAGKVCacheLLM(CustomLLM):
    """A local Hugging Face model that never prefills the same retrieved node twice.

    Takes the place of ``HuggingFaceLLM`` (all its constructor parameters, in its order) in query engines,
    chat engines and direct calls::

        Settings.llm = RAGKVCacheLLM(model_name="HuggingFaceTB/SmolLM2-135M-Instruct")
        response = index.as_query_engine().query("How long is the warranty?")

    The first question on a node stores its keys and values; later ones reuse them. Answers equal those
    without reuse. What was reused stands in ``additional_kwargs["rag_kvcache"]`` of every response
    (``report.to_dict()`` and ``link``, how the documents in the prompt were known), next to
    ``prompt_tokens``, ``completion_tokens``, ``total_tokens`` and ``cached_tokens``.

    Differences from HuggingFaceLLM, all on purpose:

    - ``is_chat_model`` unset: True when the tokenizer has a chat template.
    - ``context_window`` and ``max_new_tokens`` unset: the model's window, and the engine's setting (256).
    - ``tokenizer_name`` unset: the model's own tokenizer.
    - ``complete`` on a chat model passes the text as it is, as HuggingFaceLLM does: no chat template is put
      around it. Query engines never do this (they call ``chat``); for direct calls use ``chat``, or give
      ``completion_to_prompt``.
    - ``system_prompt`` and ``completion_to_prompt`` are obeyed by ``complete`` and ``stream_complete`` alike.
    - ``chat`` has the template rendered by the engine, so no token is added twice (BOS).
    - The async methods do not block the event loop.

    Calls take ``max_new_tokens`` (or ``max_tokens``), ``temperature``, ``top_p``, ``seed``, ``stop``,
    ``tenant``, ``reuse``, ``generate_kwargs``, and ``documents`` and ``question`` for prompts built by
    hand: the texts or nodes that may stand in the prompt, and what is asked.
    """

    model_name: str = Field(description="Name of the model: a hub id, a local folder, or 'demo'.")
    tokenizer_name: str | None = Field(default=None, description="Name of the tokenizer, if not the model's.")
    context_window: int = Field(gt=0, description="Tokens that prompt and answer may take together.")
    max_new_tokens: int = Field(gt=0, description="Largest number of tokens to generate.")
    device_map: Any = Field(default="auto", description="Where transformers places the model.")
    stopping_ids: list[int] = Field(default_factory=list, description="Token ids that end an answer.")
    tokenizer_outputs_to_remove: list[str] = Field(
        default_factory=list, description="Outputs of the tokenizer that the model must not get."
    )
    tokenizer_kwargs: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="For loading the tokenizer."
    )
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="For loading the model."
    )
    generate_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of transformers' GenerationConfig."
    )
    is_chat_model: bool = Field(description="Whether prompts are sent as chat messages.")
    tenant: str | None = Field(default=None, description="Whose cache entries to use, unless a call says.")
    reuse: Reuse | None = Field(default=None, description="Reuse mode, unless a call says.")
    temperature: float | None = Field(
        default=None, ge=0, description="0 is greedy; None leaves it to the model and generate_kwargs."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus sampling.")
    seed: int | None = Field(default=None, description="Makes sampling reproducible.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Fields of rag_kvcache.Settings.")

    _engine: Engine = PrivateAttr()
    _owns_engine: bool = PrivateAttr()
    _spans: SpanLog = PrivateAttr()

    def __init__(
        self,
        context_window: int | None = None,
        max_new_tokens: int | None = None,
        query_wrapper_prompt: str | PromptTemplate = "{query_str}",
        tokenizer_name: str | None = None,
        model_name: str | None = None,
        model: Any | None = None,
        tokenizer: Any | None = None,
        device_map: Any = "auto",
        stopping_ids: Sequence[int] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        tokenizer_outputs_to_remove: Sequence[str] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        is_chat_model: bool | None = None,
        callback_manager: CallbackManager | None = None,
        system_prompt: str = "",
        messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None = None,
        completion_to_prompt: Callable[[str], str] | None = None,
        pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.DEFAULT,
        output_parser: BaseOutputParser | None = None,
        *,
        engine: Engine | None = None,
        tenant: str | None = None,
        reuse: Reuse | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
        **settings_fields: Any,
    ) -> None:
        """Load the model, or use the one given.

        The parameters up to ``output_parser`` are HuggingFaceLLM's. ``model_name="demo"`` is the demo
        model. ``engine`` is a ``rag_kvcache.Engine`` to share between adapters; it stays open when this LLM
        is closed. ``tenant``, ``reuse``, ``temperature``, ``top_p`` and ``seed`` are defaults for calls.
        ``settings``, and any further keyword, are fields of ``rag_kvcache.Settings`` (``max_bytes=``, ...).
        """
        generate_kwargs = dict(generate_kwargs or {})
        loading.check_generate_kwargs(generate_kwargs, ConfigurationError)
        loading.check_outputs_to_remove(tokenizer_outputs_to_remove or ())
        loading.check_reuse(reuse)
        if isinstance(settings, Settings):
            settings = settings.model_dump(exclude_unset=True)
        fields = {**(settings or {}), **settings_fields}
        own_fields = {k: v for k, v in (("tenant", tenant), ("reuse", reuse)) if v is not None}
        ready = loading.build_engine(
            engine=engine,
            model=model,
            tokenizer=tokenizer,
            model_name=model_name,
            tokenizer_name=tokenizer_name,
            device_map=device_map,
            model_kwargs=model_kwargs or {},
            tokenizer_kwargs=tokenizer_kwargs or {},
            settings=fields if engine is not None else {**fields, **own_fields},
        )
        if isinstance(query_wrapper_prompt, str):
            query_wrapper_prompt = PromptTemplate(query_wrapper_prompt)
        try:
            loading.check_known(generate_kwargs, ready)
            super().__init__(
                context_window=loading.window(context_window, ready.context_window),
                max_new_tokens=ready.settings.max_new_tokens if max_new_tokens is None else max_new_tokens,
                query_wrapper_prompt=query_wrapper_prompt,
                tokenizer_name=tokenizer_name,
                model_name=model_name or ready.model_name,
                device_map=device_map,
                stopping_ids=list(stopping_ids or ()),
                tokenizer_kwargs=dict(tokenizer_kwargs or {}),
                tokenizer_outputs_to_remove=list(tokenizer_outputs_to_remove or ()),
                model_kwargs=dict(model_kwargs or {}),
                generate_kwargs=generate_kwargs,
                is_chat_model=ready.has_chat_template if is_chat_model is None else is_chat_model,
                callback_manager=callback_manager or CallbackManager([]),
                system_prompt=system_prompt,
                messages_to_prompt=messages_to_prompt or ChatTemplateText(ready),
                completion_to_prompt=completion_to_prompt,
                pydantic_program_mode=pydantic_program_mode,
                output_parser=output_parser,
                tenant=tenant,
                reuse=reuse,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                settings=fields,
            )
        except ValueError as e:
            if engine is None:
                ready.close()
            raise loading.wrong_arguments(e) from None
        self._engine = ready
        self._owns_engine = engine is None
        self._spans = register()

    @classmethod
    def class_name(cls) -> str:
        """Name of this class in serialised form."""
        return "RAGKVCache_LLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Window, output length, name and kind of the model, as LlamaIndex asks for them."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_new_tokens,
            model_name=self.model_name,
            is_chat_model=self.is_chat_model,
        )

    @property
    def engine(self) -> Engine:
        """The engine that serves this LLM: statistics, invalidation, other adapters."""
        return self._engine

    def close(self) -> None:
        """Free model and cache, unless the engine was passed in."""
        if self._owns_engine:
            self._engine.close()

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def warm(
        self,
        nodes_or_texts: Any,
        prompt: BasePromptTemplate | str | None = None,
        *,
        context_variable: str = "context_str",
        tenant: str | None = None,
        **prompt_args: Any,
    ) -> WarmReport:
        """Build the caches of nodes ahead of the first question.

        nodes_or_texts: nodes (with or without score), Documents or strings.
        prompt: the template that the query engine uses, a ``text_qa_template``; without it, LlamaIndex's
            default one in the form (chat or completion) that a query engine with this LLM uses.
        context_variable: the template's variable in which the nodes will stand. Each node is built as the
            first one there.
        prompt_args: values of the template's other variables, as far as they stand before the nodes.
        """
        template = prompt if prompt is not None else DEFAULT_TEXT_QA_PROMPT_SEL
        if isinstance(template, str):
            template = PromptTemplate(template)
        if not isinstance(template, BasePromptTemplate):
            raise InvalidTypeError(
                f"prompt must be a prompt template or a str, not {type(template).__name__}"
            )
        unknown = {name: f"{{{name}}}" for name in template.template_vars if name not in template.kwargs}
        values = {**unknown, **prompt_args, context_variable: _SLOT}
        if self.is_chat_model:
            rendered = self._chat_prompt(self._get_messages(template, **values))
        else:
            rendered = self._get_prompt(template, **values)
        head, slot, _ = as_text(rendered).partition(_SLOT)
        if not slot:
            raise RequestError(
                f"the prompt has no variable {context_variable!r}: name the one that takes the nodes "
                "with context_variable="
            )
        before = [n for n in unknown if n not in prompt_args and n != context_variable and f"{{{n}}}" in head]
        if before:
            raise RequestError(
                f"{', '.join(before)} stands before the nodes in this prompt: pass its value if it is always "
                "the same; if it is the question, nodes behind it cannot be built ahead"
            )
        # Synthesizers strip nodes before they put them into the prompt.
        documents = [Document(d.text.strip(), d.id, d.metadata) for d in as_documents(nodes_or_texts)]
        return self._engine.warm(documents, prompt=rendered, slot=_SLOT, tenant=tenant or self.tenant)

    # Calls ------------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text. ``formatted``: it already has its system and wrapper prompts."""
        request = self._request(self._completion_prompt(prompt, formatted), kwargs)
        return _whole(self._engine.generate(request.prompt, **request.arguments), request)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Continue a text, piece by piece. The last piece carries the report."""
        request = self._request(self._completion_prompt(prompt, formatted), kwargs)
        return _pieces(self._engine.stream(request.prompt, **request.arguments), request)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """``complete`` without blocking the event loop."""
        request = self._request(self._completion_prompt(prompt, formatted), kwargs)
        return _whole(await self._engine.agenerate(request.prompt, **request.arguments), request)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """``stream_complete`` without blocking the event loop."""
        request = self._request(self._completion_prompt(prompt, formatted), kwargs)
        return _apieces(self._engine.astream(request.prompt, **request.arguments), request)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        request = self._request(self._chat_prompt(messages), kwargs)
        return responses.chat(_whole(self._engine.generate(request.prompt, **request.arguments), request))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation, piece by piece. The last piece carries the report."""
        request = self._request(self._chat_prompt(messages), kwargs)
        return _chat_pieces(self._engine.stream(request.prompt, **request.arguments), request)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """``chat`` without blocking the event loop."""
        request = self._request(self._chat_prompt(messages), kwargs)
        return responses.chat(
            _whole(await self._engine.agenerate(request.prompt, **request.arguments), request)
        )

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """``stream_chat`` without blocking the event loop."""
        request = self._request(self._chat_prompt(messages), kwargs)
        return _achat_pieces(self._engine.astream(request.prompt, **request.arguments), request)

    # Behind the calls -------------------------------------------------------------------------------

    def _completion_prompt(self, prompt: str, formatted: bool) -> str:
        if not isinstance(prompt, str):
            raise InvalidTypeError(
                f"prompt must be a str, not {type(prompt).__name__}: call chat() for messages"
            )
        if formatted:
            return prompt
        if self.query_wrapper_prompt is not None:
            prompt = self.query_wrapper_prompt.format(query_str=prompt)
        given = self.completion_to_prompt
        if given is not None and given is not default_completion_to_prompt:
            return given(prompt)
        return f"{self.system_prompt} {prompt}" if self.system_prompt else prompt

    def _chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        given = self.messages_to_prompt
        if given is not None and not isinstance(given, ChatTemplateText):
            return given(messages)
        dicts = as_dicts(messages)
        return dicts if self._engine.has_chat_template else generic_messages_to_prompt(messages)

    def _request(self, prompt: Prompt, options: Mapping[str, Any]) -> _Request:
        if unknown := options.keys() - set(_PER_CALL):
            raise InvalidTypeError(
                f"unknown argument {', '.join(sorted(unknown))}: a call takes {', '.join(_PER_CALL)}; "
                "other fields of GenerationConfig go into generate_kwargs"
            )
        said = {name: value for name, value in options.items() if value is not None}
        tenant = said.get("tenant", self.tenant)
        text = as_text(prompt)
        question = said.get("question")
        if "documents" in said:
            documents, documents_from = as_documents(said["documents"]), "call"
        else:
            retrieved = retrieved_for(self._spans, text)
            documents, documents_from = retrieved.documents, "run"
            if question is None and retrieved.question and retrieved.question in text:
                question = retrieved.question
            if not any(stands_in(d.text, text) for d in documents):
                # Then the engine looks for all texts it knows, these among them.
                self._engine.remember(documents, tenant=tenant)
                documents, documents_from = (), "registry"
        arguments = {
            **self._sampling(said),
            "documents": documents,
            "question": question,
            "tenant": tenant,
            "reuse": said.get("reuse", self.reuse),
            "max_new_tokens": said.get("max_new_tokens", said.get("max_tokens", self._usual_length())),
        }
        return _Request(prompt, arguments, documents_from)

    def _usual_length(self) -> int | None:
        # None is the engine's default, which may shrink to what fits into the window; a number must fit.
        return None if self.max_new_tokens == self._engine.settings.max_new_tokens else self.max_new_tokens

    def _sampling(self, said: Mapping[str, Any]) -> dict[str, Any]:
        per_call = dict(said.get("generate_kwargs", {}))
        loading.check_generate_kwargs(per_call, RequestError)
        further = {**self.generate_kwargs, **per_call}
        temperature = said.get("temperature", self.temperature)
        top_p = said.get("top_p", self.top_p)
        # An argument beats the same field of generate_kwargs.
        if temperature is not None:
            further.pop("temperature", None)
            further.pop("do_sample", None)
        if top_p is not None:
            further.pop("top_p", None)
        if self.stopping_ids:
            further["eos_token_id"] = loading.end_of_sequence(self._engine, self.stopping_ids, further)
        stop = [*_strings(said.get("stop")), *_strings(further.pop("stop_strings", None))]
        return {
            "temperature": temperature,
            "top_p": top_p,
            "seed": said.get("seed", self.seed),
            "stop": tuple(dict.fromkeys(stop)),
            "generate_kwargs": further,
        }

    @field_serializer("model_kwargs", "tokenizer_kwargs", "generate_kwargs", "settings", "device_map")
    def _plain(self, value: Any) -> Any:
        """Plain JSON types; access tokens stay out."""
        return _plain(value)


def _whole(generation: Generation, request: _Request) -> CompletionResponse:
    return responses.completion(generation.text, None, generation, request.documents_from)


# Closing one of these closes the engine's stream, which ends the generation.


def _pieces(chunks: Iterator[Chunk], request: _Request) -> CompletionResponseGen:
    text = ""
    try:
        for chunk in chunks:
            text += chunk.text
            yield responses.completion(text, chunk.text, chunk.generation, request.documents_from)
    finally:
        if isinstance(chunks, Generator):
            chunks.close()


def _chat_pieces(chunks: Iterator[Chunk], request: _Request) -> ChatResponseGen:
    with closing(_pieces(chunks, request)) as pieces:
        for piece in pieces:
            yield responses.chat(piece)


async def _apieces(chunks: AsyncIterator[Chunk], request: _Request) -> CompletionResponseAsyncGen:
    text = ""
    try:
        async for chunk in chunks:
            text += chunk.text
            yield responses.completion(text, chunk.text, chunk.generation, request.documents_from)
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


async def _achat_pieces(chunks: AsyncIterator[Chunk], request: _Request) -> ChatResponseAsyncGen:
    async with aclosing(_apieces(chunks, request)) as pieces:
        async for piece in pieces:
            yield responses.chat(piece)


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k not in _SECRETS}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value)
