"""Warming documents for a chain's own prompt."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate

from langchain_rag_kvcache import ChatRAGKVCache, RAGKVCacheLLM
from langchain_rag_kvcache.template import with_slot
from rag_kvcache.errors import InvalidTypeError, RequestError
from tests.integrations.langchain.shop import CHAT_PROMPT, DOCUMENTS, KETTLE, TEXT_PROMPT, make_chain


def test_the_first_question_finds_its_document_warm(chat: ChatRAGKVCache) -> None:
    report = chat.warm(DOCUMENTS, CHAT_PROMPT)
    assert report.built == 3
    answer = (
        make_chain(chat).invoke("How long is the warranty of the kettle?").response_metadata["rag_kvcache"]
    )
    (document,) = (s for s in answer["segments"] if s["kind"] == "document")
    assert document["reused"] >= 0.9 * document["tokens"]


def test_the_text_model_too(llm: RAGKVCacheLLM) -> None:
    llm.warm([KETTLE], TEXT_PROMPT)
    prompt = TEXT_PROMPT.format(context=KETTLE.page_content, question="How long?")
    (generation,) = llm.bind(documents=[KETTLE]).bound.generate([prompt], documents=[KETTLE]).generations[0]
    assert generation.generation_info is not None
    (document,) = (
        s for s in generation.generation_info["rag_kvcache"]["segments"] if s["kind"] == "document"
    )
    assert document["reused"] >= 0.9 * document["tokens"]


def test_for_a_tenant(chat: ChatRAGKVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    warm = chat.engine.warm
    monkeypatch.setattr(chat.engine, "warm", lambda *a, **k: seen.append(k) or warm(*a, **k))
    chat.warm(["one text"], CHAT_PROMPT, tenant="ann")
    chat.model_copy(update={"tenant": "bob"}).warm(["one text"])
    assert [k["tenant"] for k in seen] == ["ann", "bob"]
    assert "prompt" not in seen[1]


def test_rendering() -> None:
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "Answer in {language}. {{literal}}"),
            MessagesPlaceholder("history"),
            ("human", "{docs}\n{question}"),
        ]
    )
    system, human = with_slot(prompt, "docs", {"language": "English"}).to_messages()
    assert system.content == "Answer in English. {literal}"
    assert human.content == "{docs}\n{question}"
    text = PromptTemplate.from_template("{context} {question}", partial_variables={"question": "why?"})
    assert with_slot(text, "context", {}).to_string() == "{context} why?"
    assert with_slot("a {context} b", "context", {}).to_string() == "a {context} b"


def test_a_variable_before_the_documents_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    prompt = PromptTemplate.from_template("{question} {context} {tail}")
    with caplog.at_level(logging.WARNING):
        with_slot(prompt, "context", {})
    assert "{question} stands before" in caplog.text
    assert "{tail}" not in caplog.text


@pytest.mark.parametrize("prompt", [CHAT_PROMPT, TEXT_PROMPT])
def test_a_wrong_variable_names_the_right_ones(prompt: Any) -> None:
    with pytest.raises(RequestError, match="context, question"):
        with_slot(prompt, "docs", {})


def test_wrong_prompts() -> None:
    with pytest.raises(InvalidTypeError):
        with_slot(3, "context", {})
    with pytest.raises(RequestError, match=r"\{context\}"):
        with_slot("no slot", "context", {})
