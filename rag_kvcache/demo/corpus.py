"""The knowledge base of an invented shop, and questions about it, in English and Chinese."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Literal


@dataclass(frozen=True)
class Article:
    """One document. ``text`` is its Markdown, title line included."""

    id: str
    title: str
    text: str

    @property
    def language(self) -> Literal["en", "zh"]:
        """The language it is written in."""
        return "zh" if self.id.startswith("zh-") else "en"


def load_articles() -> tuple[Article, ...]:
    """All articles, sorted by id."""
    names = sorted(
        (entry for entry in (_data() / "documents").iterdir() if entry.name.endswith(".md")),
        key=lambda entry: entry.name,
    )
    return tuple(_article(entry) for entry in names)


def load_questions() -> tuple[str, ...]:
    """The questions, in the order they are asked. Later ones come back to documents of earlier ones."""
    return tuple(json.loads((_data() / "questions.json").read_text(encoding="utf-8")))


def _article(entry: Traversable) -> Article:
    text = entry.read_text(encoding="utf-8").strip()
    return Article(entry.name.removesuffix(".md"), text.partition("\n")[0].removeprefix("# "), text)


def _data() -> Traversable:
    return files("rag_kvcache.demo") / "data"
