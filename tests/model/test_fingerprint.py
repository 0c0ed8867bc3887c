"""What must tell two models, or two tokenizers, apart, and what must not."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

from rag_kvcache.model.fingerprint import model_fingerprint, tokenizer_fingerprint, weights_version
from tests.tiny import tiny_model, tiny_tokenizer

_SCRIPT = """
from rag_kvcache.model.fingerprint import model_fingerprint, tokenizer_fingerprint
from tests.tiny import tiny_model, tiny_tokenizer
print(model_fingerprint(tiny_model()).hex(), tokenizer_fingerprint(tiny_tokenizer()).hex())
"""


def test_the_same_model_has_the_same_fingerprint() -> None:
    assert model_fingerprint(tiny_model()) == model_fingerprint(tiny_model())


def test_two_processes_agree() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path)) + ":."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    mine = f"{model_fingerprint(tiny_model()).hex()} {tokenizer_fingerprint(tiny_tokenizer()).hex()}\n"
    assert outputs == {mine}


@pytest.mark.parametrize(
    "other",
    [
        lambda: tiny_model(seed=1),
        lambda: tiny_model().to(torch.bfloat16),
        lambda: tiny_model("llama3_rope"),
        lambda: tiny_model("llama_yarn"),
        lambda: tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 20000.0}),
        lambda: tiny_model(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        lambda: tiny_model(attn_implementation="eager"),
        lambda: tiny_model("qwen2"),
        lambda: tiny_model(rms_norm_eps=1e-3),
    ],
    ids=["weights", "dtype", "llama3 rope", "yarn", "theta", "linear rope", "attention", "family", "config"],
)
def test_each_of_these_alone_is_another_model(other: object) -> None:
    assert model_fingerprint(other()) != model_fingerprint(tiny_model())  # type: ignore[operator]


def test_one_layer_trained_is_another_model() -> None:
    model = tiny_model()
    before, version = model_fingerprint(model), weights_version(model)
    optimizer = torch.optim.SGD(model.model.layers[1].mlp.parameters(), lr=0.1)
    model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()
    assert weights_version(model) != version
    assert model_fingerprint(model) != before


def test_a_loaded_checkpoint_and_a_moved_tensor_are_seen_cheaply() -> None:
    model = tiny_model()
    version = weights_version(model)
    assert weights_version(model) == version
    model.load_state_dict(tiny_model(seed=3).state_dict())
    assert (after := weights_version(model)) != version
    model.to(torch.float64)
    assert weights_version(model) != after


def test_generating_changes_nothing() -> None:
    model = tiny_model("llama_dynamic_ntk")
    before, version = model_fingerprint(model), weights_version(model)
    model.generate(torch.arange(3, 409).unsqueeze(0), max_new_tokens=3, do_sample=False)
    assert (model_fingerprint(model), weights_version(model)) == (before, version)


def test_adapters_are_told_apart_and_recognised() -> None:
    from peft import LoraConfig, get_peft_model

    base = model_fingerprint(tiny_model())
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), config, adapter_name="one")
    model.add_adapter("two", config)
    prints = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        prints[name] = model_fingerprint(model), weights_version(model)
    assert prints["one"][0] != prints["two"][0] != base != prints["one"][0]
    assert prints["one"][1] != prints["two"][1]
    model.set_adapter("one")
    assert model_fingerprint(model) == prints["one"][0]


@pytest.mark.parametrize("change", ["template", "token", "special", "normalizer"])
def test_each_of_these_alone_is_another_tokenizer(change: str) -> None:
    from tokenizers import normalizers

    tokenizer = copy.deepcopy(tiny_tokenizer())
    before = tokenizer_fingerprint(tokenizer)
    assert before == tokenizer_fingerprint(tiny_tokenizer())
    match change:
        case "template":
            tokenizer.chat_template += " "
        case "token":
            tokenizer.add_tokens(["kettle!"])
        case "special":
            tokenizer.eos_token = "<|endoftext|>"
        case "normalizer":
            tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert tokenizer_fingerprint(tokenizer) != before
