from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.llms.rag_kvcache import RAGKVCacheLLM

from tests.integrations.llama_index_adapter.recording import TEXTS, RecordingEngine, WordEmbedding
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def engine() -> Iterator[RecordingEngine]:
    with RecordingEngine(
        tiny_model(max_position_embeddings=4096), tiny_tokenizer(), max_new_tokens=8
    ) as engine:
        yield engine


@pytest.fixture
def llm(engine: RecordingEngine) -> RAGKVCacheLLM:
    return RAGKVCacheLLM(engine=engine)


@pytest.fixture
def nodes() -> list[TextNode]:
    return [TextNode(text=text, id_=f"node-{i}") for i, text in enumerate(TEXTS)]


@pytest.fixture
def index(nodes: list[TextNode]) -> VectorStoreIndex:
    return VectorStoreIndex(nodes, embed_model=WordEmbedding())
