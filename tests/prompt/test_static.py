"""Learning which beginning of the prompts stays the same."""

from __future__ import annotations

import numpy as np
import pytest

from rag_kvcache.prompt.static import StaticPrefix, StaticPrefixes


def tokens(*runs: tuple[int, int]) -> np.ndarray:
    """Runs of (first id, length) as one array of ids."""
    return np.concatenate([np.arange(first, first + n) for first, n in runs]).astype(np.int64)


SYSTEM = (1000, 20)
TEMPLATE = tokens(SYSTEM, (2000, 10))
DOCUMENT = (5000, 30)


def longest(found: StaticPrefix) -> int:
    return max(found.cuts, default=0)


def ask(known: StaticPrefixes, head: np.ndarray, tail: bytes) -> StaticPrefix:
    """A prompt of this head, a document and a tail."""
    return known.observe(np.concatenate([head, tokens(DOCUMENT)]), len(head), tail)


class TestSeenTwice:
    def test_nothing_is_static_at_first_sight(self) -> None:
        assert ask(StaticPrefixes(), TEMPLATE, b"q1") == StaticPrefix(())

    def test_the_same_head_with_another_tail_is_static(self) -> None:
        known = StaticPrefixes()
        ask(known, TEMPLATE, b"q1")
        assert ask(known, TEMPLATE, b"q2") == StaticPrefix((len(TEMPLATE),))

    def test_the_same_prompt_again_proves_nothing(self) -> None:
        known = StaticPrefixes()
        for _ in range(5):
            assert ask(known, TEMPLATE, b"q1") == StaticPrefix(())

    def test_once_proven_is_proven_for_every_tail(self) -> None:
        known = StaticPrefixes()
        for tail in (b"q1", b"q2"):
            ask(known, TEMPLATE, tail)
        for tail in (b"q1", b"q2", b"q3"):
            assert longest(ask(known, TEMPLATE, tail)) == len(TEMPLATE)

    def test_no_head_no_static(self) -> None:
        known = StaticPrefixes()
        for tail in (b"q1", b"q2", b"q3"):
            assert known.observe(tokens(DOCUMENT), 0, tail) == StaticPrefix(())


class TestTemplatesThatShareASystemPrompt:
    def test_what_they_share_is_static_before_either_is_proven(self) -> None:
        known = StaticPrefixes()
        ask(known, tokens(SYSTEM, (2000, 10)), b"q1")
        assert longest(ask(known, tokens(SYSTEM, (3000, 10)), b"q2")) == SYSTEM[1]

    def test_each_proves_its_own_whole_head_and_keeps_the_shared_part_apart(self) -> None:
        known = StaticPrefixes()
        heads = [tokens(SYSTEM, (2000, 10)), tokens(SYSTEM, (3000, 15))]
        for tail in (b"q1", b"q2", b"q3"):
            last = [ask(known, head, tail).cuts for head in heads]
        assert last == [(20, 30), (20, 35)]

    def test_other_beginnings_share_nothing(self) -> None:
        known = StaticPrefixes()
        ask(known, tokens((1000, 30)), b"q1")
        assert ask(known, tokens((4000, 30)), b"q2") == StaticPrefix(())

    def test_a_few_tokens_in_common_are_no_template(self) -> None:
        known = StaticPrefixes()
        ask(known, tokens((1000, 3), (2000, 30)), b"q1")
        assert ask(known, tokens((1000, 3), (3000, 30)), b"q2") == StaticPrefix(())


class TestHeadsThatNeverRepeat:
    def test_a_thousand_histories_leave_one_common_part(self) -> None:
        known = StaticPrefixes()
        found = [ask(known, tokens(SYSTEM, (10_000 + 50 * n, 40)), b"q%d" % n) for n in range(1000)]
        assert {f.cuts for f in found[1:]} == {(SYSTEM[1],)}
        assert sum(len(f.retired) for f in found) == 0
        assert held_tokens(known) < 64 * 60 + 100

    def test_the_common_part_only_shrinks_and_says_what_it_was(self) -> None:
        """As when a date of which ever more digits change stands in the system prompt."""
        known, seen, retired = StaticPrefixes(), [], []
        for n, shared in enumerate((20, 18, 18, 12, 15, 9)):
            found = ask(known, tokens((1000, shared), (10_000 + 50 * n, 40)), b"q%d" % n)
            seen.append(longest(found))
            retired += [len(r) for r in found.retired]
        assert seen == [0, 18, 18, 12, 12, 9]
        assert retired == [18, 12]

    def test_a_retired_beginning_is_given_as_it_was(self) -> None:
        known = StaticPrefixes()
        ask(known, tokens((1000, 20), (2000, 5)), b"q1")
        ask(known, tokens((1000, 20), (3000, 5)), b"q2")
        (old,) = ask(known, tokens((1000, 15), (4000, 5)), b"q3").retired
        assert old.tolist() == tokens((1000, 20)).tolist()

    @pytest.mark.parametrize("kind", ["other beginnings", "histories"])
    def test_memory_is_bounded(self, kind: str) -> None:
        known = StaticPrefixes()
        for n in range(500):
            start = 10_000 + 100 * n
            head = tokens((start, 60)) if kind == "other beginnings" else tokens(SYSTEM, (start, 40))
            ask(known, head, b"q%d" % n)
            ask(known, np.concatenate([head[:50], tokens((7, 10))]), b"q%d" % n)  # makes common parts
        assert held_tokens(known) <= (64 + 8) * 60


class TestNamed:
    def test_is_static_at_once(self) -> None:
        known = StaticPrefixes()
        known.name(TEMPLATE)
        assert longest(ask(known, TEMPLATE, b"q1")) == len(TEMPLATE)

    def test_only_for_prompts_that_begin_so(self) -> None:
        known = StaticPrefixes()
        known.name(TEMPLATE)
        assert longest(known.observe(TEMPLATE[:-1], len(TEMPLATE) - 1, b"q")) == 0
        assert longest(ask(known, tokens((1000, 5), (3000, 10)), b"q")) == 0

    def test_several_are_cuts_in_ascending_order(self) -> None:
        known = StaticPrefixes()
        known.name(TEMPLATE)
        known.name(TEMPLATE[:5])
        assert ask(known, TEMPLATE, b"q1").cuts == (5, len(TEMPLATE))

    def test_may_be_longer_than_the_head(self) -> None:
        known = StaticPrefixes()
        known.name(TEMPLATE)
        assert longest(known.observe(TEMPLATE, 5, b"q1")) == len(TEMPLATE)

    def test_is_bounded(self) -> None:
        known = StaticPrefixes(max_named=2)
        named = [tokens((1000 * n, 10)) for n in range(1, 4)]
        for n in named:
            known.name(n)
        assert [longest(ask(known, n, b"q")) for n in named] == [0, 10, 10]


@pytest.mark.parametrize("named", [True, False])
def test_what_is_learnt_is_a_copy(named: bool) -> None:
    known, prompt = StaticPrefixes(), np.concatenate([TEMPLATE, tokens(DOCUMENT)])
    if named:
        known.name(prompt[: len(TEMPLATE)])
    else:
        known.observe(prompt, len(TEMPLATE), b"q1")
    assert held_tokens(known) == len(TEMPLATE)
    prompt[:] = 0
    assert longest(ask(known, TEMPLATE, b"q2")) == len(TEMPLATE)


def held_tokens(known: StaticPrefixes) -> int:
    """All token ids remembered, of whatever sort."""
    arrays = [head.ids for head in known._heads.values()] + [*known._named.values(), *known._common]
    return sum(len(a if a.base is None else a.base) for a in arrays)
