"""What differs between the transformers versions this package supports (5.20 and later)."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin

# transformers 5.24 renamed the keyword `past_key_values` to `cache`, in arguments and in outputs.
_NAMES = ("cache", "past_key_values")


def cache_keyword() -> str:
    """The keyword under which a model's ``generate`` and ``forward`` take a cache."""
    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next((name for name in _NAMES if name in parameters), _NAMES[-1])


def cache_of(output: Any) -> Any:
    """The cache in a forward pass's output, None when the model returned none."""
    return next((output[name] for name in _NAMES if name in output), None)
