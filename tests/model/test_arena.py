"""The arena: copies in, copies out, nothing shared, nothing larger kept alive."""

from __future__ import annotations

import pytest
import torch

from rag_kvcache.model.arena import Arena, Geometry, Planes
from rag_kvcache.model.language_model import LanguageModel
from tests.tiny import FAMILIES, tiny_model

LAYERS, HEADS, DIM = 3, 2, 4


def geometry(dtype: torch.dtype = torch.float32) -> Geometry:
    one = torch.zeros(1, HEADS, 1, DIM, dtype=dtype)
    return Geometry.of([(one, one)] * LAYERS)


def mixed_geometry() -> Geometry:
    """Two layers of one shape, one of another, and values smaller than keys in the last."""
    wide, narrow = torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 1, 8)
    return Geometry.of([(wide, wide), (narrow, narrow), (wide, torch.zeros(1, 2, 1, 3))])


def stored(g: Geometry, tokens: int, first: float = 0.0) -> Planes:
    """Planes in which every number is another one."""
    planes = []
    for spec in g.planes:
        shape = spec.empty(tokens).shape
        planes.append(torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) + first)
        first += shape.numel()
    return tuple(planes)


def append(arena: Arena, tokens: int, value: float = 1.0, *, grad: bool = False) -> None:
    """What a model does: one update per layer."""
    for layer in arena.cache.layers:
        shape = (1, layer.keys.shape[1], tokens, layer.keys.shape[3])
        keys = torch.full(shape, value, requires_grad=grad)
        values = torch.full((*shape[:3], layer.values.shape[3]), -value, requires_grad=grad)
        with torch.no_grad():
            layer.update(keys, values)


class TestGeometry:
    def test_layers_of_one_shape_share_a_plane(self) -> None:
        (plane,) = geometry().planes
        assert plane.slots == tuple((layer, name) for layer in range(LAYERS) for name in "kv")
        assert plane.empty(5).shape == (2 * LAYERS, HEADS, 5, DIM)

    def test_other_shapes_have_their_own(self) -> None:
        g = mixed_geometry()
        assert sorted(len(p.slots) for p in g.planes) == [1, 2, 3]
        assert sorted(slot for p in g.planes for slot in p.slots) == [
            (layer, name) for layer in range(3) for name in "kv"
        ]

    def test_a_dtype_has_its_own_too(self) -> None:
        a, b = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16)
        assert len(Geometry.of([(a, a), (b, b)]).planes) == 2

    @pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
    def test_bytes_per_token_are_those_of_what_is_taken(self, dtype: torch.dtype, size: int) -> None:
        g = geometry(dtype)
        assert g.bytes_per_token == 2 * LAYERS * HEADS * DIM * size
        arena = Arena(g, 10)
        arena.place(tuple(spec.empty(4) for spec in g.planes), 4)
        assert sum(p.untyped_storage().nbytes() for p in arena.take(0, 4)) == 4 * g.bytes_per_token


class TestPlaceAndTake:
    @pytest.mark.parametrize("g", [geometry(), mixed_geometry()], ids=["uniform", "mixed"])
    def test_what_was_placed_is_taken(self, g: Geometry) -> None:
        arena, a, b = Arena(g, 10), stored(g, 3), stored(g, 4, 1000.0)
        arena.place(a, 3)
        arena.place(b, 4)
        assert arena.length == 7
        assert all(map(torch.equal, arena.take(0, 3), a))
        assert all(map(torch.equal, arena.take(3, 7), b))

    def test_only_so_many_tokens_are_placed(self) -> None:
        g = geometry()
        arena, a = Arena(g, 10), stored(g, 5)
        arena.place(a, 2)
        assert arena.length == 2
        assert torch.equal(arena.take(0, 2)[0], a[0][:, :, :2])

    def test_layers_see_what_was_placed(self) -> None:
        g = mixed_geometry()
        arena, a = Arena(g, 10), stored(g, 3)
        arena.place(a, 3)
        for spec, plane in zip(g.planes, a, strict=True):
            for index, (layer, name) in enumerate(spec.slots):
                held = arena.cache.layers[layer]
                tensor = held.keys if name == "k" else held.values
                assert torch.equal(tensor[0, :, :3], plane[index])

    def test_share_no_storage_with_what_is_stored(self) -> None:
        g = geometry()
        arena, a = Arena(g, 10), stored(g, 3)
        before = a[0].clone()
        arena.place(a, 3)
        for layer in arena.cache.layers:
            layer.keys.fill_(-1.0)
        assert torch.equal(a[0], before)
        taken = arena.take(0, 3)
        for layer in arena.cache.layers:
            layer.keys.fill_(-2.0)
        assert -2.0 not in taken[0]

    def test_two_takes_share_nothing(self) -> None:
        arena = Arena(geometry(), 10)
        append(arena, 4)
        one, two = arena.take(0, 4), arena.take(0, 4)
        assert one[0].untyped_storage().data_ptr() != two[0].untyped_storage().data_ptr()

    @pytest.mark.parametrize("run", [(0, 3), (2, 7), (5, 6), (0, 10)], ids=str)
    def test_what_is_taken_keeps_nothing_larger_alive(self, run: tuple[int, int]) -> None:
        arena = Arena(mixed_geometry(), 10)
        append(arena, 10)
        for plane in arena.take(*run):
            assert plane.untyped_storage().nbytes() == plane.numel() * plane.element_size()
            assert plane.is_contiguous()
            assert plane.shape[2] == run[1] - run[0]

    def test_what_is_taken_has_no_grad(self) -> None:
        arena = Arena(geometry(), 10)
        append(arena, 4, grad=True)
        for plane in arena.take(0, 4):
            assert not plane.requires_grad
            assert plane.grad_fn is None

    def test_what_is_taken_is_an_ordinary_tensor_in_inference_mode_too(self) -> None:
        with torch.inference_mode():
            arena = Arena(geometry(), 10)
            append(arena, 4)
            (plane,) = arena.take(0, 4)
        assert not plane.is_inference()


class TestLayer:
    def test_update_appends_and_returns_all(self) -> None:
        arena = Arena(geometry(), 10)
        append(arena, 3, 1.0)
        layer = arena.cache.layers[0]
        new = torch.full((1, HEADS, 2, DIM), 2.0)
        keys, values = layer.update(new, new)
        assert keys.shape == values.shape == (1, HEADS, 5, DIM)
        assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 2, 2]

    def test_update_allocates_nothing(self) -> None:
        arena = Arena(geometry(), 10)
        layer = arena.cache.layers[0]
        where = layer.keys.untyped_storage().data_ptr()
        for _ in range(10):
            keys, _ = layer.update(torch.ones(1, HEADS, 1, DIM), torch.ones(1, HEADS, 1, DIM))
        assert keys.untyped_storage().data_ptr() == where

    def test_more_than_the_capacity_is_an_error(self) -> None:
        arena = Arena(geometry(), 4)
        append(arena, 4)
        with pytest.raises(RuntimeError):
            append(arena, 1)

    def test_mask_sizes_count_all_that_is_held_without_offset(self) -> None:
        arena = Arena(geometry(), 10)
        layer = arena.cache.layers[0]
        assert layer.get_mask_sizes(3) == (3, 0)
        append(arena, 5)
        assert layer.get_mask_sizes(1) == (6, 0)
        assert arena.cache.get_mask_sizes(2, 0) == (7, 0)

    def test_length_is_what_is_filled(self) -> None:
        arena = Arena(geometry(), 10)
        assert arena.cache.get_seq_length() == 0
        append(arena, 5)
        assert arena.cache.get_seq_length() == arena.length == 5

    def test_crop_drops_the_last_tokens(self) -> None:
        arena = Arena(geometry(), 10)
        append(arena, 5)
        arena.cache.crop(-1)
        assert arena.length == 4
        append(arena, 1, 7.0)
        assert arena.cache.layers[1].keys[0, 0, :5, 0].tolist() == [1, 1, 1, 1, 7]

    def test_crop_stops_at_nothing(self) -> None:
        arena = Arena(geometry(), 10)
        append(arena, 2)
        arena.cache.crop(-5)
        assert arena.length == 0

    def test_reset_forgets(self) -> None:
        arena = Arena(geometry(), 10)
        append(arena, 2)
        arena.cache.reset()
        assert arena.length == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_keeps_every_layer_at_full_length(family: str) -> None:
    """Also those with a sliding window of 8, of which the default cache keeps 7 keys."""
    model = LanguageModel(tiny_model(family))
    assert model.geometry is not None
    arena = model.new_arena(40)
    model.prefill(torch.arange(3, 33).numpy(), arena)
    assert {layer.get_seq_length() for layer in arena.cache.layers} == {30}
    assert len(arena.cache.layers) == model.model.config.num_hidden_layers
