from __future__ import annotations

from pathlib import Path

import pytest

from rag_kvcache.demo.__main__ import main
from rag_kvcache.demo.compare import Answer, Row
from rag_kvcache.demo.table import summarise


def row(cached: int, *, text: str = "49 euros", off: float = 2.0, on: float = 0.1) -> Row:
    prompt = 1000
    return Row(
        "How much?",
        ("kettle",),
        Answer("49 euros", off, 0, prompt),
        Answer(text, on, cached, prompt - cached),
    )


class TestSummary:
    def test_counts_questions_whose_documents_were_all_cached(self) -> None:
        text = summarise([row(0, on=2.0), row(980), row(400)])
        assert "1 of 3 questions" in text
        assert "20.0 times sooner" in text
        assert "3 of 3 texts are identical" in text

    def test_says_when_nothing_was_cached_and_texts_differ(self) -> None:
        text = summarise([row(0, text="something else")])
        assert "No question" in text
        assert "0 of 1 texts" in text


class TestProgram:
    @pytest.mark.real_model
    def test_prints_a_table(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "120")
        assert main(["--questions", "1", "--max-new-tokens", "2", "--documents", "1", "--answers"]) == 0
        printed = capsys.readouterr().out
        assert "How long can I send an item back" in printed
        assert "1 of 1 texts are identical" in printed
        assert "from_model_id" in printed

    def test_a_model_that_does_not_exist_is_one_clear_line(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main(["--model", str(tmp_path / "nothing")]) == 1
        printed = capsys.readouterr().out
        assert "The demo cannot run" in printed
        assert "Traceback" not in printed

    @pytest.mark.parametrize("arguments", [["--max-new-tokens", "0"], ["--documents", "many"]])
    def test_wrong_numbers_are_refused(self, arguments: list[str]) -> None:
        with pytest.raises(SystemExit):
            main(arguments)
