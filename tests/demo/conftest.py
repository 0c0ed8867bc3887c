"""The demo models, converted once per machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rag_kvcache.model.demo import demo_model_folder


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return demo_model_folder()


@pytest.fixture(scope="session")
def demo_tokenizer(demo_folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_folder)
    return tokenizer
