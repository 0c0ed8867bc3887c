"""The package stands beside llama_index.core in one namespace, and importing it does nothing."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_torch_and_registers_no_handler() -> None:
    code = (
        "import sys, llama_index.core\n"
        "from llama_index.core.instrumentation import get_dispatcher\n"
        "before = len(get_dispatcher().event_handlers), len(get_dispatcher().span_handlers)\n"
        "from llama_index.llms.rag_kvcache import RAGKVCacheLLM\n"
        "after = len(get_dispatcher().event_handlers), len(get_dispatcher().span_handlers)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, before == after)\n"
        "print(RAGKVCacheLLM.class_name())"
    )
    assert run(code) == "False False True\nRAGKVCache_LLM"


def test_namespace_is_shared() -> None:
    code = (
        "import llama_index, llama_index.core, llama_index.llms.rag_kvcache\n"
        "print(getattr(llama_index, '__file__', None), getattr(llama_index.llms, '__file__', None))"
    )
    assert run(code) == "None None"


def test_missing_llama_index_names_the_extra() -> None:
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'llama_index.core':\n"
        "            raise ModuleNotFoundError('blocked', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from rag_kvcache.errors import MissingExtraError\n"
        "try:\n"
        "    import llama_index.llms.rag_kvcache\n"
        "except MissingExtraError as e:\n"
        "    print(e)"
    )
    assert run(code) == "llama-index-core is not installed: pip install 'rag-kvcache[llama-index]'"
