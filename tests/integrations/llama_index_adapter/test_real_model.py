"""The demo model, by name, in a plain query engine."""

from __future__ import annotations

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.schema import TextNode
from llama_index.llms.rag_kvcache import RAGKVCacheLLM

from tests.integrations.llama_index_adapter.recording import TEXTS, WordEmbedding


class Answers(BaseEventHandler):
    """Keeps what the LLM returned, as an observability tool would see it."""

    seen: list[LLMChatEndEvent] = []  # noqa: RUF012  # a pydantic field

    def handle(self, event: BaseEvent, **kwargs: object) -> None:
        if isinstance(event, LLMChatEndEvent):
            self.seen.append(event)


@pytest.mark.real_model
def test_second_question_on_a_node_reuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers()
    monkeypatch.setattr(get_dispatcher(), "event_handlers", [*get_dispatcher().event_handlers, answers])
    monkeypatch.setattr(Settings, "_llm", None)
    index = VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=WordEmbedding())

    with RAGKVCacheLLM(model_name="demo", max_new_tokens=12, temperature=0) as llm:
        Settings.llm = llm
        query_engine = index.as_query_engine(similarity_top_k=2)
        query_engine.query("How long is the warranty of the kettle?")
        warm = query_engine.query("Is the warranty of the kettle void without the receipt?")
        last = answers.seen[-1]
        cold = llm.chat(last.messages, reuse="off")

    assert str(warm).strip()
    assert last.response is not None
    report = last.response.additional_kwargs["rag_kvcache"]
    documents = [s for s in report["segments"] if s["kind"] == "document"]
    assert len(documents) == 2
    assert sum(s["reused"] for s in documents) >= 0.9 * sum(s["tokens"] for s in documents)
    assert report["link"] == "run"
    assert last.response.message.content == cold.message.content
