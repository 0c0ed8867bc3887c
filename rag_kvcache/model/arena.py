"""One preallocated KV cache per request, on transformers' cache classes.

Stored segments are copied in once, then the model appends behind them in place: no concatenation per
step, and nothing shared with stored entries. Every layer is kept at full length, also those with a
sliding window (whose default cache drops what stored segments still need); the attention mask alone
keeps a local layer local.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from rag_kvcache.model.rotation import Rotation

Planes = tuple[torch.Tensor, ...]
"""KV of a run of tokens: per plane a tensor [slots, kv_heads, tokens, head_dim]."""


@dataclass(frozen=True)
class PlaneSpec:
    """All keys and values of the same shape, in one tensor, so that a segment moves in one copy.

    slots: which (layer index, "k" or "v") stands at each index of the tensor's first dimension.
    """

    slots: tuple[tuple[int, str], ...]
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, tokens: int) -> torch.Tensor:
        """An uninitialised plane [slots, heads, tokens, dim]."""
        return torch.empty(
            (len(self.slots), self.heads, tokens, self.dim), dtype=self.dtype, device=self.device
        )


@dataclass(frozen=True)
class Geometry:
    """The KV shapes of a model, layer by layer, grouped into planes."""

    layers: int
    planes: tuple[PlaneSpec, ...]

    @classmethod
    def of(cls, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Self:
        """From one forward's keys and values per layer, each [1, heads, tokens, dim]."""
        groups: dict[tuple[int, int, torch.dtype, torch.device], list[tuple[int, str]]] = {}
        for layer, pair in enumerate(layers):
            for name, t in zip("kv", pair, strict=True):
                groups.setdefault((t.shape[1], t.shape[3], t.dtype, t.device), []).append((layer, name))
        return cls(len(layers), tuple(PlaneSpec(tuple(s), h, d, t, v) for (h, d, t, v), s in groups.items()))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that one token takes, all layers together."""
        return sum(len(p.slots) * p.heads * p.dim * p.dtype.itemsize for p in self.planes)


class ArenaLayer(CacheLayerMixin):
    """One layer's view of an arena: keys and values [1, heads, capacity, dim], ``length`` of them filled."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: torch.Tensor = keys
        self.values: torch.Tensor = values
        self.length = 0
        self.awaited: torch.Tensor | None = None
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the arena is allocated at once."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take ``key_states``/``value_states`` [1, heads, new, dim]; returns all that is filled.

        They go to the awaited slots if there are any, else behind what is filled.
        """
        start, new = self.length, key_states.shape[-2]
        if self.awaited is not None:
            self.keys.index_copy_(2, self.awaited, key_states)
            self.values.index_copy_(2, self.awaited, value_states)
            self.length, self.awaited = start + new, None
            return self.keys[:, :, : self.length], self.values[:, :, : self.length]
        # narrow, as it raises beyond the capacity; a slice would be empty there and take one token silently.
        self.keys.narrow(-2, start, new).copy_(key_states)
        self.values.narrow(-2, start, new).copy_(value_states)
        self.length = start + new
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(KV length including the coming queries, offset 0)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens filled."""
        return self.length

    def get_max_length(self) -> int:
        """Unbounded as far as transformers is concerned: capacity covers what is asked for."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.24

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens (transformers passes a negative count)."""
        self.length -= min(self.length, abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget all tokens."""
        self.length, self.awaited = 0, None


def _strides(indices: Sequence[int]) -> list[slice]:
    """Evenly spaced indices as one slice, others one by one: a slice is a view, a list would be a copy."""
    if len(indices) > 1:
        step = indices[1] - indices[0]
        if list(indices) == list(range(indices[0], indices[-1] + 1, step)):
            return [slice(indices[0], indices[-1] + 1, step)]
    return [slice(i, i + 1) for i in indices]


class Arena:
    """KV for one sequence of at most ``capacity`` tokens, batch size 1.

    Contract: tokens [0, length) are filled; ``place`` appends a stored segment, the model appends what
    it computes, ``take`` copies a run out. What is taken shares no storage with the arena. ``place_moved``
    and ``await_slots`` fill it out of order: the next forward then computes the awaited slots.
    """

    def __init__(self, geometry: Geometry, capacity: int, memory: Planes | None = None) -> None:
        """``memory``: planes of a finished arena of this geometry and capacity, to be written over.

        Fresh memory costs a page fault every 4 KB, which takes longer than the copy itself.
        """
        self.capacity = capacity
        views: list[dict[str, torch.Tensor]] = [{} for _ in range(geometry.layers)]
        with torch.inference_mode(False):  # a tensor made in the caller's could not be written to outside it
            self._planes = memory or tuple(spec.empty(capacity) for spec in geometry.planes)
            for spec, plane in zip(geometry.planes, self._planes, strict=True):
                for index, (layer, name) in enumerate(spec.slots):
                    views[layer][name] = plane[index].unsqueeze(0)
        self._specs = geometry.planes
        self._layers = [ArenaLayer(view["k"], view["v"]) for view in views]
        self.cache = Cache(layers=list(self._layers))

    @property
    def memory(self) -> Planes:
        """The planes themselves, for the next arena when this one is finished."""
        return self._planes

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    @property
    def length(self) -> int:
        """Tokens filled, the same in all layers."""
        return self._layers[0].length

    def place(self, planes: Planes, tokens: int) -> None:
        """Append the first ``tokens`` tokens of a stored segment: one copy per plane."""
        start = self.length
        for mine, stored in zip(self._planes, planes, strict=True):
            mine.narrow(2, start, tokens).copy_(stored[:, :, :tokens])
        for layer in self._layers:
            layer.length = start + tokens

    def place_moved(
        self, planes: Planes, first: int, at: int, tokens: int, distance: int, rotations: Sequence[Rotation]
    ) -> None:
        """Write tokens [first, first + tokens) of a stored segment to slots [at, at + tokens).

        The keys are turned ``distance`` positions on by their layer's rotation, in the same pass. What is
        filled does not change: say so with ``await_slots``.
        """
        for spec, mine, stored in zip(self._specs, self._planes, planes, strict=True):
            to, source = mine.narrow(2, at, tokens), stored.narrow(2, first, tokens)
            values = [i for i, (_, name) in enumerate(spec.slots) if name == "v"]
            for run in _strides(values):
                to[run].copy_(source[run])
            for rotation in dict.fromkeys(rotations):
                keys = [
                    i
                    for i, (layer, name) in enumerate(spec.slots)
                    if name == "k" and rotations[layer] == rotation
                ]
                for run in _strides(keys):
                    rotation.turn_into(to[run], source[run], distance)

    def rewind(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens."""
        for layer in self._layers:
            layer.length, layer.awaited = tokens, None

    def await_slots(self, slots: torch.Tensor, total: int) -> None:
        """Tokens [0, total) are filled but for ``slots`` [n] (ascending), which the next forward computes."""
        for layer in self._layers:
            layer.awaited, layer.length = slots.to(layer.device), total - len(slots)

    @property
    def awaited(self) -> torch.Tensor | None:
        """The slots that the next forward computes, None when it appends."""
        return self._layers[0].awaited

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's keys and values, each [heads, capacity, dim]."""
        return self._layers[index].keys[0], self._layers[index].values[0]

    def take(self, start: int, stop: int) -> Planes:
        """Copies of tokens [start, stop), each a fresh contiguous tensor without grad."""
        with torch.inference_mode(False), torch.no_grad():
            return tuple(
                plane[:, :, start:stop].clone(memory_format=torch.contiguous_format) for plane in self._planes
            )
