from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from rag_kvcache.demo.corpus import load_articles, load_questions

CHINESE = re.compile(r"[\u4e00-\u9fff]")


def test_there_are_enough_articles_in_both_languages() -> None:
    articles = load_articles()
    assert len(articles) >= 14
    assert sum(a.language == "zh" for a in articles) >= 4
    assert len({a.id for a in articles}) == len({a.text for a in articles}) == len(articles)


def test_articles_are_in_the_language_they_claim() -> None:
    for article in load_articles():
        share = len(CHINESE.findall(article.text)) / len(article.text)
        assert share > 0.5 if article.language == "zh" else share == 0, article.id


def test_every_article_has_a_title() -> None:
    assert all(a.title and not a.title.startswith("#") and a.text.startswith("# ") for a in load_articles())


def test_articles_are_200_to_900_tokens_long(demo_tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = {a.id: len(demo_tokenizer(a.text).input_ids) for a in load_articles()}
    assert {id for id, tokens in lengths.items() if not 200 <= tokens <= 900} == set()


def test_articles_do_not_repeat_each_other() -> None:
    sentences = [s for a in load_articles() for s in re.split(r"(?<=[.。])\s*", a.text) if len(s) > 20]
    assert len(sentences) == len(set(sentences))


def test_questions_are_asked_in_both_languages() -> None:
    questions = load_questions()
    assert len(questions) == len(set(questions)) >= 8
    assert any(CHINESE.search(q) for q in questions)
