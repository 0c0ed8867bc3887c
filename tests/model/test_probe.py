"""Whether a model's KV can be cut by token is found out at construction."""

from __future__ import annotations

import pytest
import torch
import transformers

from rag_kvcache import Engine, Reason
from rag_kvcache.model import probe as module
from rag_kvcache.model.probe import probe
from rag_kvcache.model.support import FAMILIES, context_window, exact_limit
from tests.tiny import FAMILIES as TINY
from tests.tiny import tiny_model, tiny_tokenizer


def mamba() -> transformers.PreTrainedModel:
    config = transformers.MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2, state_size=4)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", TINY)
def test_every_tested_family_is_in_the_table_and_allowed(family: str) -> None:
    model = tiny_model(family)
    assert FAMILIES[model.config.model_type].exact
    geometry = probe(model).geometry
    assert geometry is not None
    keys_and_values = 2 * model.config.num_hidden_layers
    assert sum(len(p.slots) for p in geometry.planes) == keys_and_values


@pytest.mark.parametrize(
    "config",
    [
        lambda: transformers.StableLmConfig(
            vocab_size=512,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
        ),
        lambda: transformers.OPTConfig(
            vocab_size=512,
            hidden_size=32,
            num_hidden_layers=2,
            ffn_dim=64,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        ),
    ],
    ids=["stablelm", "opt"],
)
def test_a_family_nobody_vouched_for_is_tried_and_works(config: object) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config()).eval()  # type: ignore[operator]
    assert model.config.model_type not in FAMILIES
    probed = probe(model)
    assert probed.geometry is not None
    assert "tried" in probed.reason


def test_a_family_that_continues_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.delitem(module.FAMILIES, "llama")
    forward = model.forward

    def forgetful(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        if kwargs["input_ids"].shape[1] < 8:  # type: ignore[attr-defined]
            out.logits = out.logits + 1.0
        return out

    monkeypatch.setattr(model, "forward", forgetful)
    probed = probe(model)
    assert probed.geometry is None
    assert "differently" in probed.reason


def test_a_recurrent_model_is_served_uncached_and_never_called_a_hit() -> None:
    assert probe(mamba()).geometry is None
    engine = Engine(mamba(), tiny_tokenizer(), max_new_tokens=4)
    for _ in range(2):
        generation = engine.answer("how long?", ["The warranty lasts two years."])
    assert generation.report.reason == Reason.UNSUPPORTED_FAMILY
    assert generation.report.reused_tokens == 0
    assert len(generation.token_ids) == 4
    assert engine.warm(["x y z"]).skipped[0][1] == Reason.UNSUPPORTED_FAMILY


def test_an_encoder_decoder_is_refused_at_construction() -> None:
    from rag_kvcache.errors import UnsupportedModelError

    config = transformers.T5Config(vocab_size=512, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=8)
    with pytest.raises(UnsupportedModelError, match="decoder"):
        Engine(transformers.T5ForConditionalGeneration(config), tiny_tokenizer())


@pytest.mark.parametrize(
    ("family", "limit"),
    [
        ("llama", None),
        ("llama_yarn", None),
        ("llama3_rope", None),
        ("gemma3", None),
        ("bloom", None),
        ("llama_dynamic_ntk", 400),
        ("phi3_longrope", 256),
    ],
)
def test_only_length_dependent_rope_has_a_limit(family: str, limit: int | None) -> None:
    assert exact_limit(tiny_model(family).config) == limit


@pytest.mark.parametrize(
    ("family", "window"), [("llama", 1024), ("gpt2", 1024), ("llama_dynamic_ntk", 1600), ("bloom", 77)]
)
def test_the_context_window(family: str, window: int) -> None:
    assert context_window(tiny_model(family).config, 77) == window
