"""``from_model_id``: the arguments of HuggingFacePipeline, and the engine's own."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_rag_kvcache import ChatRAGKVCache, RAGKVCacheLLM
from langchain_rag_kvcache.construct import to_device
from rag_kvcache.engine import Engine
from rag_kvcache.errors import ConfigurationError

MODELS = [ChatRAGKVCache, RAGKVCacheLLM]


@pytest.fixture
def loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that engines are loaded with; the tiny one is handed out."""
    seen: list[dict[str, Any]] = []

    def load(model: str, **kwargs: Any) -> Engine:
        seen.append({"model": model, **{k: v for k, v in kwargs.items() if v is not None}})
        return engine

    monkeypatch.setattr(Engine, "from_pretrained", load)
    return seen


@pytest.mark.parametrize("model", MODELS)
def test_arguments_of_hugging_face_pipeline(model: Any, loaded: list[dict[str, Any]]) -> None:
    llm = model.from_model_id(
        model_id="org/name",
        task="text-generation",
        backend="default",
        device=-1,
        model_kwargs={
            "torch_dtype": "float32",
            "attn_implementation": "eager",
            "revision": "abc",
            "token": "t",
        },
        pipeline_kwargs={"max_new_tokens": 5, "do_sample": False, "repetition_penalty": 1.1},
        batch_size=2,
        verbose=False,
        tags=["shop"],
    )
    assert loaded == [
        {
            "model": "org/name",
            "dtype": "float32",
            "device": "cpu",
            "revision": "abc",
            "model_kwargs": {"attn_implementation": "eager", "token": "t"},
            "tokenizer_kwargs": {"token": "t"},
            "max_new_tokens": 5,
        }
    ]
    assert llm.max_new_tokens == 5
    assert llm.temperature == 0
    assert llm.generate_kwargs == {"repetition_penalty": 1.1}
    assert llm.model_name == "org/name"
    assert llm.tags == ["shop"]


def test_our_own_arguments(loaded: list[dict[str, Any]]) -> None:
    llm = ChatRAGKVCache.from_model_id(
        "folder",
        gguf_file="m.gguf",
        dtype="bfloat16",
        device_map="auto",
        max_bytes="1GB",
        levels=("static",),
        tenant="ann",
        reuse="off",
        max_tokens=9,
        top_p=0.9,
        seed=1,
        stop=["x"],
        trust_remote_code=True,
        tokenizer="other",
    )
    assert loaded == [
        {
            "model": "folder",
            "gguf_file": "m.gguf",
            "dtype": "bfloat16",
            "device_map": "auto",
            "max_bytes": "1GB",
            "levels": ("static",),
            "tenant": "ann",
            "reuse": "off",
            "max_new_tokens": 9,
            "trust_remote_code": True,
            "tokenizer": "other",
        }
    ]
    assert (llm.tenant, llm.reuse, llm.max_new_tokens, llm.stop) == ("ann", "off", 9, ["x"])


@pytest.mark.parametrize("model", MODELS)
def test_with_an_engine(model: Any, engine: Engine) -> None:
    llm = model.from_model_id(
        engine=engine, max_new_tokens=2, tenant="ann", pipeline_kwargs={"do_sample": False}
    )
    assert llm.engine is engine
    assert (llm.max_new_tokens, llm.tenant, llm.temperature) == (2, "ann", 0)
    assert llm.model_name == engine.model_name
    assert llm.invoke("Hello")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"task": "text2text-generation"}, "decoder-only"),
        ({"backend": "openvino"}, "backend='default'"),
        ({"batch_size": 0}, "batch_size"),
        ({"device": -2}, "device"),
        ({"device": 99}, "device=-1"),
        ({"device": -1, "device_map": "auto"}, "one of them"),
        ({"pipeline_kwargs": {"return_full_text": True}}, "never repeats"),
        ({"pipeline_kwargs": {"top_q": 1}}, "top_q"),
        ({"pipeline_kwargs": {"max_new_tokens": 3}, "max_new_tokens": 4}, "twice"),
        ({"dtype": "float32", "model_kwargs": {"torch_dtype": "float16"}}, "twice"),
        ({"max_byte": 3}, "did you mean max_bytes"),
        ({"load_in_8bit": True}, "model_kwargs"),
        ({"model_id": None}, "model_id"),
    ],
)
def test_what_cannot_be_honoured(arguments: dict[str, Any], says: str, loaded: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigurationError, match=says):
        ChatRAGKVCache.from_model_id(**{"model_id": "org/name", **arguments})


@pytest.mark.parametrize(
    "arguments",
    [{"max_bytes": "1GB"}, {"device": -1}, {"dtype": "float16"}, {"model_kwargs": {}}, {"gguf_file": "x"}],
)
def test_an_engine_that_exists_cannot_be_changed(arguments: dict[str, Any], engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        ChatRAGKVCache.from_model_id(engine=engine, **arguments)


def test_devices() -> None:
    assert to_device(None) is None
    assert to_device(-1) == "cpu"
    assert to_device("cuda:1") == "cuda:1"


def test_unknown_model() -> None:
    with pytest.raises(ConfigurationError):
        ChatRAGKVCache.from_model_id("./no/such/folder")
