"""A template that asks before it shows the documents: nothing is stored, and the report says why."""

from __future__ import annotations

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from langchain_rag_kvcache import ChatRAGKVCache
from rag_kvcache import Engine
from tests.engine.helpers import entries
from tests.integrations.langchain.shop import ShopRetriever
from tests.tiny import tiny_model, tiny_tokenizer

PROMPT = ChatPromptTemplate.from_template("Question: {question}\nContext: {context}\nAnswer:")


def test_the_retrievers_query_is_taken_for_the_question() -> None:
    engine = Engine(tiny_model(), tiny_tokenizer(), max_new_tokens=4)
    retrieve = ShopRetriever() | (lambda documents: "\n\n".join(d.page_content for d in documents))
    chain = {"context": retrieve, "question": RunnablePassthrough()} | PROMPT | ChatRAGKVCache(engine=engine)
    for number in (111, 222, 333):
        answer = chain.invoke(f"My secret number is {number}: how long is the warranty of the kettle?")
        report = answer.response_metadata["rag_kvcache"]
        assert report["reason"] == "question_first"
        assert [s["reason"] for s in report["segments"] if s["kind"] == "document"] == ["question_first"]
    stored = " ".join(engine.tokenizer.decode(e.token_ids) for e in entries(engine))
    assert "secret" not in stored
    assert "warranty" not in stored


def test_a_rewritten_query_that_stands_elsewhere_by_chance_is_not_taken_for_it() -> None:
    engine = Engine(tiny_model(), tiny_tokenizer(), max_new_tokens=4)
    rewritten = RunnableLambda(lambda question: "kettle") | ShopRetriever()
    retrieve = rewritten | (lambda documents: "\n\n".join(d.page_content for d in documents))
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You know all about any kettle there is."), ("human", "Context: {context}\n{question}")]
    )
    chain = {"context": retrieve, "question": RunnablePassthrough()} | prompt | ChatRAGKVCache(engine=engine)
    for question in ("How long does its warranty last?", "And how much does it hold?"):
        report = chain.invoke(question).response_metadata["rag_kvcache"]
    (document,) = [s for s in report["segments"] if s["kind"] == "document"]
    assert document["reused"] == document["tokens"]
