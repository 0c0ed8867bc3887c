"""What importing the package does, and does not."""

from __future__ import annotations

import subprocess
import sys


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_no_torch() -> None:
    code = (
        "import sys, langchain_rag_kvcache; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert _run(code) == "[]"


def test_importing_touches_no_other_chain() -> None:
    code = """
import langchain_core.tracers.context as context
before = len(context._configure_hooks)
import langchain_rag_kvcache
print(len(context._configure_hooks) - before)
"""
    assert _run(code) == "0"


def test_missing_langchain_names_the_extra() -> None:
    code = """
import sys
sys.modules["langchain_core"] = None
try:
    import langchain_rag_kvcache
except ImportError as error:
    print(type(error).__name__, error)
"""
    assert "MissingExtraError" in _run(code)
    assert "rag-kvcache[langchain]" in _run(code)
