"""Re-positioned keys are the keys that the model computes at the new position."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from rag_kvcache.model.rope import Rotation, find_rope
from rag_kvcache.model.rope import _kv_at as kv_at_or_none
from tests.tiny import FAMILIES, tiny_model

NOT_MOVED = {"gpt2": "learned positions", "bloom": "takes no positions"}
MOVED = sorted(FAMILIES.keys() - NOT_MOVED.keys())
LAYOUTS = [Rotation((1.0, 0.3, 0.01)), Rotation((1.0, 0.3, 0.01), interleaved=True)]


def _kv_at(model: PreTrainedModel, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    layers = kv_at_or_none(model, start)
    assert layers is not None
    return layers


def turned(rotation: Rotation, keys: torch.Tensor, distance: int) -> torch.Tensor:
    out = torch.full_like(keys, float("nan"))
    rotation.turn_into(out, keys, distance)
    return out


@pytest.mark.parametrize("distance", [1, 7, 61, 180])
@pytest.mark.parametrize("family", MOVED)
def test_moved_keys_are_those_computed_there(family: str, distance: int) -> None:
    model = tiny_model(family)
    rope = find_rope(model)
    assert rope.rotations is not None, rope.reason
    layers = zip(rope.rotations, _kv_at(model, 3), _kv_at(model, 3 + distance), strict=True)
    for rotation, (keys, values), (expected, same_values) in layers:
        torch.testing.assert_close(turned(rotation, keys, distance), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(turned(rotation, expected, -distance), keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(values, same_values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "gptj", "gpt_neox"])
def test_in_half_precision_the_error_stays_within_rounding(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    rotations = find_rope(model).rotations
    assert rotations is not None
    for rotation, (keys, _), (expected, _) in zip(
        rotations, _kv_at(model, 0), _kv_at(model, 61), strict=True
    ):
        error = (turned(rotation, keys, 61).float() - expected.float()).abs().max()
        assert error <= 3e-2 * expected.float().abs().max()


@pytest.mark.parametrize(("family", "why"), NOT_MOVED.items())
def test_what_cannot_be_moved_is_refused_with_the_reason(family: str, why: str) -> None:
    rope = find_rope(tiny_model(family))
    assert rope.rotations is None
    assert why in rope.reason


def test_layers_with_bases_of_their_own_turn_each_by_its_own() -> None:
    rotations = find_rope(tiny_model("gemma3")).rotations
    assert rotations is not None
    assert rotations[0] == rotations[2] != rotations[1] == rotations[3]


def test_gptj_pairs_neighbours_and_llama_halves() -> None:
    gptj, llama = find_rope(tiny_model("gptj")).rotations, find_rope(tiny_model()).rotations
    assert gptj is not None
    assert gptj[0].interleaved
    assert llama is not None
    assert not llama[0].interleaved


def test_alibi_has_nothing_to_turn() -> None:
    assert find_rope(tiny_model("falcon_alibi")).rotations == (Rotation(),) * 3


@pytest.mark.parametrize("rotation", LAYOUTS)
class TestRotation:
    def test_moves_add_up(self, rotation: Rotation) -> None:
        keys = torch.randn(2, 5, 8)
        step_by_step = keys
        for distance in (7, -3, 100):
            step_by_step = turned(rotation, step_by_step, distance)
        torch.testing.assert_close(step_by_step, turned(rotation, keys, 104), rtol=0, atol=1e-5)

    def test_there_and_back_is_where_it_was(self, rotation: Rotation) -> None:
        keys = torch.randn(2, 5, 8)
        there = turned(rotation, keys, 5000)
        torch.testing.assert_close(turned(rotation, there, -5000), keys, rtol=0, atol=1e-5)

    def test_dimensions_beyond_pass_through_bit_by_bit(self, rotation: Rotation) -> None:
        keys = torch.randn(2, 5, 8, dtype=torch.float32)
        assert torch.equal(turned(rotation, keys, 17)[..., 6:], keys[..., 6:])

    def test_each_pair_keeps_its_length(self, rotation: Rotation) -> None:
        keys = torch.randn(2, 5, 8)
        before, after = (
            torch.stack(rotation._pairs(t[..., :6])).norm(dim=0) for t in (keys, turned(rotation, keys, 33))
        )
        torch.testing.assert_close(before, after)

    def test_no_distance_changes_nothing(self, rotation: Rotation) -> None:
        keys = torch.randn(2, 5, 8)
        assert torch.equal(turned(rotation, keys, 0), keys)

    def test_the_source_is_left_alone(self, rotation: Rotation) -> None:
        keys = torch.randn(2, 5, 8)
        before = keys.clone()
        turned(rotation, keys, 9)
        assert torch.equal(keys, before)


def test_a_long_way_is_as_exact_as_a_short_one() -> None:
    """Angles in float64: float32 ones would be off by 0.002 rad at 30,000 positions."""
    rotation, keys = Rotation((1.0,)), torch.tensor([[1.0, 0.0]])
    angle = torch.tensor(30_001.0, dtype=torch.float64)
    expected = torch.stack([angle.cos(), angle.sin()]).float()
    torch.testing.assert_close(turned(rotation, keys, 30_001)[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_deep_half_precision_models_is_no_refusal(dtype: torch.dtype) -> None:
    deep = tiny_model(num_hidden_layers=40).to(dtype)
    rotations = find_rope(deep).rotations
    assert rotations is not None
    assert {len(r.frequencies) for r in rotations} == {4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_large_dimensions_do_not_hide_a_rotation(dtype: torch.dtype) -> None:
    """As in Qwen2, whose key biases reach the hundreds: here dimensions that GPT-NeoX does not rotate."""
    model = tiny_model("gpt_neox")
    attention = model.gpt_neox.layers[0].attention
    bias = attention.query_key_value.bias.data.view(4, 3, 16)
    bias[:, 1, 4:] = 1e6 if dtype == torch.float32 else 1e3
    rotations = find_rope(model.to(dtype)).rotations
    assert rotations is not None
    assert len(rotations[0].frequencies) == 2


def test_trying_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama_dynamic_ntk").train()
    find_rope(model)
    assert all(m.training and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("window", [8, 9, 16, 64])
def test_a_short_context_window_is_no_error(window: int) -> None:
    rope = find_rope(tiny_model(max_position_embeddings=window))
    assert (rope.rotations is None) == (window < 10)
    assert find_rope(tiny_model("gpt2", n_positions=window)).rotations is None


def test_state_other_than_kv_is_refused() -> None:
    import transformers

    config = transformers.JambaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=2,
        attn_layer_period=4,
        attn_layer_offset=2,
        mamba_d_state=4,
        use_mamba_kernels=False,
        pad_token_id=0,
    )
    assert find_rope(transformers.AutoModelForCausalLM.from_config(config)).rotations is None


def test_linearly_scaled_positions_move_too() -> None:
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_model(rope_parameters=scaled)
    rotations = find_rope(model).rotations
    assert rotations is not None
    assert rotations[0].frequencies[0] == pytest.approx(0.25)
    for rotation, (keys, _), (expected, _) in zip(
        rotations, _kv_at(model, 3), _kv_at(model, 64), strict=True
    ):
        torch.testing.assert_close(turned(rotation, keys, 61), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_an_adapter_changes_nothing(family: str) -> None:
    peft = pytest.importorskip("peft")
    target = {"llama": "k_proj", "gpt2": "c_attn", "bloom": "query_key_value"}[family]
    config = peft.LoraConfig(target_modules=[target], fan_in_fan_out=family == "gpt2")
    adapted = peft.get_peft_model(tiny_model(family), config)
    assert find_rope(adapted) == find_rope(tiny_model(family))
