"""What import-linter cannot say about the layers (the rest stands in pyproject.toml)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "rag_kvcache"
LANGCHAIN = ROOT / "integrations" / "langchain-rag-kvcache"


def sources() -> Iterator[Path]:
    """The core without the demo, which may use everything, and the LangChain adapter."""
    yield from (p for p in CORE.rglob("*.py") if p.relative_to(CORE).parts[0] != "demo")
    yield from LANGCHAIN.rglob("*.py")


def imported(source: Path) -> set[str]:
    """Top-level names of all that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("source", list(sources()), ids=lambda p: str(p.relative_to(ROOT)))
def test_llama_index_is_imported_by_its_adapter_alone(source: Path) -> None:
    assert "llama_index" not in imported(source)
