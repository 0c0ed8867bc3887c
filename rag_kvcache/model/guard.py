"""One lock per model object, shared by all engines around it: one generation at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn


class _Locks:
    """Hands out the one lock of a module. Weak: a model that goes takes its lock along."""

    def __init__(self) -> None:
        self._mine = Lock()
        self._locks: WeakKeyDictionary[nn.Module, Lock] = WeakKeyDictionary()

    def of(self, model: nn.Module) -> Lock:
        with self._mine:
            return self._locks.setdefault(model, Lock())


# Process-wide on purpose: two engines around one model object must take turns, and the model object
# itself, being the user's, gets no attribute from us.
lock_of = _Locks().of


@contextmanager
def rope_restored(model: nn.Module) -> Iterator[None]:
    """Put dynamic RoPE back as it was.

    Dynamic NTK keeps the frequencies of the longest sequence it saw, so that in plain transformers a long
    prompt's answer depends on the prompts before it. Here it does not.
    """
    dynamic = [m for m in model.modules() if hasattr(m, "max_seq_len_cached") and hasattr(m, "inv_freq")]
    kept = [(m, dict(m._buffers), m.max_seq_len_cached) for m in dynamic]
    try:
        yield
    finally:
        for module, buffers, longest in kept:
            module._buffers.update(buffers)
            module.max_seq_len_cached = longest


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run without dropout and without grad, then put every submodule's training flag back."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for m in training:
            m.training = True
