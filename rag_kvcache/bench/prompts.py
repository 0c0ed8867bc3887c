"""Prompts of given lengths from the demo's knowledge base."""

from __future__ import annotations

from dataclasses import dataclass

from rag_kvcache import Document, Engine
from rag_kvcache.demo.corpus import load_articles

_HEAD = "You answer customers of a shop from its knowledge base.\n\n"
_QUESTIONS = (
    "How long is the warranty of the kettle, and what do I have to send along when it breaks?",
    "Which of these can be returned after they were opened, and who then pays for the parcel?",
    "What does it cost to send a parcel to an island, and how many days does that usually take?",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt of documents and a question. ``context_tokens``: all but the question."""

    text: str
    documents: tuple[Document, ...]
    context_tokens: int
    question_tokens: int


def make_prompts(engine: Engine, context: int, question: int) -> tuple[Prompt, ...]:
    """Prompts of about ``context`` + ``question`` tokens on the same documents, asking differently."""
    articles = [a.text for a in load_articles() if a.language == "en"] * 4
    documents: list[Document] = []
    text = _HEAD
    for i, article in enumerate(articles):
        room = context - engine.count_tokens(text)
        if room < 16:
            break
        body = _first_tokens(engine, f"Article {i + 1}. {article}", room)
        documents.append(Document(body, id=f"article-{i + 1}"))
        text += body + "\n\n"
    size = engine.count_tokens(text)
    asked = (_first_tokens(engine, f"Question: {q} " * 4, question) for q in _QUESTIONS)
    return tuple(
        Prompt(text + q, tuple(documents), size, engine.count_tokens(text + q) - size) for q in asked
    )


def _first_tokens(engine: Engine, text: str, tokens: int) -> str:
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(engine.tokenizer.decode(ids[:tokens]))
