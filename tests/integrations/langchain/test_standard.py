"""LangChain's own suites for chat models, on a tiny random model.

A random model calls no tools and writes no JSON: what it cannot honestly pass is declared off.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_rag_kvcache import ChatRAGKVCache
from rag_kvcache.engine import Engine


class _Declared:
    """What the class is, and what it does not claim."""

    engine: Engine

    @pytest.fixture(autouse=True)
    def _engine(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRAGKVCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        # No api_key, timeout or max_retries: no service is called.
        return {"temperature": 0, "max_tokens": 20, "stop": []}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_tool_choice(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_image_inputs(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        # An engine holds one model: binding another is an error.
        return False

    @property
    def returns_usage_metadata(self) -> bool:
        return True


class TestUnit(_Declared, ChatModelUnitTests):
    pass


class TestIntegration(_Declared, ChatModelIntegrationTests):
    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatRAGKVCache(engine=self.engine, max_new_tokens=4)
        prompt = "The warranty of the kettle lasts two years. " * 5
        model.invoke(prompt)
        if not stream:
            return model.invoke(prompt)
        pieces = list(model.stream(prompt))
        whole = pieces[0]
        for piece in pieces[1:]:
            whole += piece
        return whole
