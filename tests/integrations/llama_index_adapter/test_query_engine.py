"""Query engines of the real llama-index-core: the second question on a node reuses it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from llama_index.core import PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.llms.rag_kvcache import RAGKVCacheLLM
from llama_index.llms.rag_kvcache.retrieved import register

from rag_kvcache.engine import Engine
from rag_kvcache.errors import InvalidTypeError, RequestError
from tests.integrations.llama_index_adapter.recording import (
    KETTLE,
    LAMP,
    SHIPPING,
    RecordingEngine,
    WordEmbedding,
    document_share,
)
from tests.tiny import tiny_model, tiny_tokenizer

WARRANTY = "How long is the warranty of the kettle?"
DESCALE = "How do I descale the kettle with citric acid?"


@pytest.fixture
def global_llm(llm: RAGKVCacheLLM) -> Iterator[RAGKVCacheLLM]:
    before = Settings._llm
    Settings.llm = llm
    yield llm
    Settings._llm = before


def uncached(prompt: object, arguments: dict[str, object]) -> str:
    with Engine(tiny_model(max_position_embeddings=4096), tiny_tokenizer(), max_new_tokens=8) as plain:
        return plain.generate(prompt, **(arguments | {"reuse": "off", "documents": ()})).text  # type: ignore[arg-type]


def test_settings_llm_and_a_plain_query_engine(
    global_llm: RAGKVCacheLLM, index: VectorStoreIndex, engine: RecordingEngine
) -> None:
    query_engine = index.as_query_engine(similarity_top_k=1)
    query_engine.query(WARRANTY)
    response = query_engine.query(DESCALE)
    assert engine.documents == [[KETTLE], [KETTLE]]
    assert engine.calls[-1][1]["documents"][0].id == "node-0"
    assert engine.calls[-1][1]["question"] == DESCALE
    assert document_share(engine.generations[-1]) >= 0.9
    assert response.response.strip() == uncached(*engine.calls[-1]).strip()  # type: ignore[union-attr]


@pytest.mark.parametrize("is_chat_model", [True, False])
@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "simple_summarize", "accumulate"])
def test_response_modes(
    mode: str, is_chat_model: bool, index: VectorStoreIndex, engine: RecordingEngine
) -> None:
    llm = RAGKVCacheLLM(engine=engine, is_chat_model=is_chat_model)
    query_engine = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=2)
    query_engine.query(WARRANTY)
    first = len(engine.calls)
    query_engine.query(WARRANTY.replace("How", "Say how"))
    asked_again = engine.generations[first]
    assert document_share(asked_again) >= 0.9, asked_again.report
    for (prompt, arguments), generation in zip(engine.calls, engine.generations, strict=True):
        assert generation.text == uncached(prompt, arguments)
    assert set(engine.documents[0]) == {KETTLE, SHIPPING} or set(engine.documents[0]) == {KETTLE, LAMP}


def test_a_joined_chunk_does_not_hide_its_nodes(
    index: VectorStoreIndex, llm: RAGKVCacheLLM, engine: RecordingEngine
) -> None:
    """Two nodes together first, then the first of them alone: it must hit."""
    index.as_query_engine(llm=llm, similarity_top_k=2).query(WARRANTY)
    index.as_query_engine(llm=llm, similarity_top_k=1).query(WARRANTY)
    assert engine.documents[1] == [KETTLE]
    assert document_share(engine.generations[1]) >= 0.9


def test_streaming_engine_whose_llm_runs_after_the_query(
    index: VectorStoreIndex, llm: RAGKVCacheLLM, engine: RecordingEngine
) -> None:
    query_engine = index.as_query_engine(llm=llm, streaming=True, similarity_top_k=1)
    first = query_engine.query(WARRANTY)
    assert not engine.calls, "the LLM runs when the stream is read"
    "".join(first.response_gen)  # type: ignore[union-attr]
    pieces = list(query_engine.query(DESCALE).response_gen)  # type: ignore[union-attr]
    assert len([p for p in pieces if p]) > 1
    assert engine.documents == [[KETTLE], [KETTLE]]
    assert document_share(engine.generations[-1]) >= 0.9
    assert "".join(pieces) == uncached(*engine.calls[-1])


def test_async_streaming_engine(index: VectorStoreIndex, llm: RAGKVCacheLLM, engine: RecordingEngine) -> None:
    query_engine = index.as_query_engine(llm=llm, streaming=True, similarity_top_k=1)

    async def ask(question: str) -> str:
        response = await query_engine.aquery(question)
        return "".join([piece async for piece in response.response_gen])  # type: ignore[union-attr]

    async def both() -> str:
        await ask(WARRANTY)
        return await ask(DESCALE)

    assert asyncio.run(both()) == uncached(*engine.calls[-1])
    assert engine.documents == [[KETTLE], [KETTLE]]
    assert document_share(engine.generations[-1]) >= 0.9


def test_concurrent_queries_do_not_mix(
    index: VectorStoreIndex, llm: RAGKVCacheLLM, engine: RecordingEngine
) -> None:
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=1)
    questions = {
        WARRANTY: KETTLE,
        "Is shipping free above 50 euros?": SHIPPING,
        "Which bulbs does the lamp Luna take?": LAMP,
    }

    async def ask_all() -> None:
        await asyncio.gather(*(query_engine.aquery(q) for q in [*questions] * 3))

    asyncio.run(ask_all())
    assert len(engine.calls) == 9
    for prompt, arguments in engine.calls:
        question = arguments["question"]
        assert question in prompt[-1]["content"]
        assert [d.text for d in arguments["documents"]] == [questions[question]]


def test_concurrent_queries_inside_one_span_do_not_mix(
    index: VectorStoreIndex, llm: RAGKVCacheLLM, engine: RecordingEngine
) -> None:
    from llama_index.core.instrumentation import get_dispatcher

    query_engine = index.as_query_engine(llm=llm, similarity_top_k=1)

    @get_dispatcher(__name__).span
    async def around() -> None:
        await query_engine.aquery(WARRANTY)
        await asyncio.gather(
            query_engine.aquery(DESCALE), query_engine.aquery("Is shipping free above 50 euros?")
        )

    asyncio.run(around())
    assert sorted(map(tuple, engine.documents)) == sorted([(KETTLE,), (KETTLE,), (SHIPPING,)])


def test_visible_metadata_is_part_of_the_document_and_hidden_is_not(
    llm: RAGKVCacheLLM, engine: RecordingEngine
) -> None:
    def index_of(mtime: str, price: str) -> VectorStoreIndex:
        node = TextNode(
            text=KETTLE, metadata={"mtime": mtime, "price": price}, excluded_llm_metadata_keys=["mtime"]
        )
        assert node.get_content(MetadataMode.LLM) == f"price: {price}\n\n{KETTLE}"
        return VectorStoreIndex([node], embed_model=WordEmbedding())

    for mtime, price in [("1", "30"), ("2", "30"), ("2", "31")]:
        index_of(mtime, price).as_query_engine(llm=llm).query(WARRANTY)
    touched, changed = engine.generations[1:]
    assert document_share(touched) >= 0.9
    assert document_share(changed) < 0.9


def test_custom_template_and_retrieval_by_hand(
    index: VectorStoreIndex, llm: RAGKVCacheLLM, engine: RecordingEngine
) -> None:
    nodes = index.as_retriever(similarity_top_k=1).retrieve(WARRANTY)
    template = PromptTemplate("Facts:\n{facts}\nTell me: {question}")
    facts = nodes[0].get_content()
    llm.predict(template, facts=facts, question="a?")
    response = llm.complete(template.format(facts=facts, question="b?"))
    assert engine.documents == [[KETTLE], [KETTLE]]
    assert response.additional_kwargs["rag_kvcache"]["link"] == "run"


def test_texts_seen_before_are_found_without_a_run(llm: RAGKVCacheLLM) -> None:
    text = "Nobody has retrieved this text in any query engine so far. It is about spoons and forks."
    llm.complete(f"Facts: {text}\na?", documents=[text])
    response = llm.complete(f"Facts: {text}\nb?")
    assert response.additional_kwargs["rag_kvcache"]["link"] == "registry"
    assert llm.complete("foo bar").additional_kwargs["rag_kvcache"]["link"] in ("none", "block")


def test_split_nodes_still_reuse(nodes: list[TextNode], engine: RecordingEngine) -> None:
    """A window too small for the node: where it is cut depends on the question, passages do not."""
    long = TextNode(
        text="\n".join(f"Article {i}: {KETTLE if i % 2 else LAMP}" for i in range(20)), id_="long"
    )
    llm = RAGKVCacheLLM(engine=engine, context_window=900)
    query_engine = VectorStoreIndex([long], embed_model=WordEmbedding()).as_query_engine(llm=llm)
    query_engine.query(WARRANTY)
    calls = len(engine.calls)
    assert calls > 1, "the node was not split"
    query_engine.query(DESCALE)
    assert document_share(engine.generations[calls]) >= 0.9
    assert {d.id for d in engine.calls[calls][1]["documents"]} == {"long"}


def test_chat_engine_with_context(
    index: VectorStoreIndex, llm: RAGKVCacheLLM, engine: RecordingEngine
) -> None:
    chat_engine = index.as_chat_engine(chat_mode="context", llm=llm, similarity_top_k=1)
    chat_engine.chat(WARRANTY)
    chat_engine.reset()
    chat_engine.chat(DESCALE)
    assert engine.documents == [[KETTLE], [KETTLE]]
    assert document_share(engine.generations[-1]) >= 0.9


def test_a_failing_node_does_not_break_the_query(
    index: VectorStoreIndex,
    llm: RAGKVCacheLLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(register(), "_fault_logged", False)

    monkeypatch.setattr("llama_index.llms.rag_kvcache.retrieved.as_document", fail)
    assert index.as_query_engine(llm=llm).query(WARRANTY).response  # type: ignore[union-attr]
    monkeypatch.setattr("llama_index.llms.rag_kvcache.retrieved.candidates", fail)
    for _ in range(2):
        assert index.as_query_engine(llm=llm).query(WARRANTY).response  # type: ignore[union-attr]
    warnings = [r for r in caplog.records if r.levelname == "WARNING" and "could not be linked" in r.message]
    assert len(warnings) == 1, "told once, not at every query"


def test_warm_builds_for_the_default_query_engine(
    index: VectorStoreIndex, nodes: list[TextNode], engine: RecordingEngine
) -> None:
    for is_chat_model in (True, False):
        engine.invalidate("all")
        llm = RAGKVCacheLLM(engine=engine, is_chat_model=is_chat_model)
        assert llm.warm(nodes).documents == 3
        index.as_query_engine(llm=llm, similarity_top_k=1).query(WARRANTY)
        assert document_share(engine.generations[-1]) >= 0.9


def test_warm_builds_for_an_own_template(
    index: VectorStoreIndex, nodes: list[TextNode], llm: RAGKVCacheLLM, engine: RecordingEngine
) -> None:
    template = PromptTemplate("Facts: {context_str}\n\nAsked: {query_str}")
    llm.warm(nodes[0], template)
    index.as_query_engine(llm=llm, text_qa_template=template, similarity_top_k=1).query(WARRANTY)
    assert document_share(engine.generations[-1]) >= 0.9


def test_warm_says_what_it_cannot_do(llm: RAGKVCacheLLM) -> None:
    with pytest.raises(RequestError, match="query_str stands before"):
        llm.warm(KETTLE, "{query_str}\n{context_str}")
    with pytest.raises(RequestError, match="context_variable"):
        llm.warm(KETTLE, "Facts: {facts}")
    with pytest.raises(InvalidTypeError, match="prompt template"):
        llm.warm(KETTLE, 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="node"):
        llm.warm([5])
    assert (
        llm.warm(KETTLE, "{persona} {facts} {query_str}", context_variable="facts", persona="x").documents
        == 1
    )
