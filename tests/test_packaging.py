"""What is installed, and what an import costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rag_kvcache

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = ("torch", "transformers", "langchain_core", "llama_index", "sentence_transformers")


def run_python(code: str, *options: str) -> str:
    """What ``code`` prints in a fresh interpreter with this interpreter's path."""
    path = "import sys; sys.path[:0] = " + repr([p for p in sys.path if p]) + "\n"
    done = subprocess.run(
        [sys.executable, *options, "-c", path + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_after(imports: str) -> set[str]:
    return set(run_python(f"{imports}\nprint(*sys.modules)").split()) & set(HEAVY)


def test_importing_the_core_loads_neither_torch_nor_a_framework() -> None:
    assert loaded_after("import rag_kvcache") == set()


def test_reading_types_and_settings_loads_nothing_heavy_either() -> None:
    assert loaded_after("from rag_kvcache import Document, Report, Settings, errors") == set()


def test_importing_the_langchain_adapter_loads_no_torch() -> None:
    assert loaded_after("import langchain_rag_kvcache").isdisjoint({"torch", "transformers", "llama_index"})


def test_importing_the_llama_index_adapter_loads_no_torch_and_no_langchain() -> None:
    loaded = loaded_after("import llama_index.llms.rag_kvcache")
    assert loaded.isdisjoint({"torch", "transformers", "langchain_core"})


@pytest.mark.parametrize("name", rag_kvcache.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(rag_kvcache, name) is not None
    assert name in dir(rag_kvcache)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        rag_kvcache.Engin  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    assert PROJECT["version"] == rag_kvcache.__version__


def test_users_get_a_range_of_torch_and_not_a_pin() -> None:
    (torch,) = [need for need in PROJECT["dependencies"] if need.startswith("torch")]
    assert "==" not in torch


def test_the_llama_index_namespace_is_left_to_the_real_package() -> None:
    folder = ROOT / "integrations" / "llama-index-llms-rag-kvcache" / "llama_index"
    assert not (folder / "__init__.py").exists()
    assert not (folder / "llms" / "__init__.py").exists()


def test_both_adapters_import_beside_the_real_frameworks() -> None:
    code = (
        "import langchain_core, llama_index.core, langchain_rag_kvcache\n"
        "import llama_index.llms.rag_kvcache as ours\n"
        "print(langchain_rag_kvcache.ChatRAGKVCache.__name__, ours.RAGKVCacheLLM.__name__)"
    )
    assert run_python(code) == "ChatRAGKVCache RAGKVCacheLLM"


@pytest.mark.parametrize(
    "package",
    [
        "rag_kvcache",
        "integrations/langchain-rag-kvcache/langchain_rag_kvcache",
        "integrations/llama-index-llms-rag-kvcache/llama_index/llms/rag_kvcache",
    ],
)
def test_every_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
