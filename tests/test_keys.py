"""Keys: two different things never share a name, and one thing has the same name everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_kvcache.keys import (
    FORMAT_VERSION,
    KeyRing,
    TokenChain,
    common_prefix,
    framed_digest,
    text_digest,
    tokens_digest,
)

ROOT = Path(__file__).parent.parent
RING = KeyRing(model=b"m" * 32, tokenizer=b"t" * 32, tenant="org")
PREFIX, TEXT = TokenChain().digest(), text_digest("The warranty lasts two years.")
GOLDEN_KEY = "cded26b303bffb00b9dc17f0a6fafe24cd0befe4490f949a9246ec04a5047565"
GOLDEN_CHAIN = "345938388518afd6e348729c9978de213619976de7d641e37015efa2f516dec0"
SCRIPT = """
from rag_kvcache.keys import *
chain = TokenChain()
chain.extend([1, 2, 3])
ring = KeyRing(model=b"m" * 32, tokenizer=b"t" * 32, tenant="org")
print(ring.key(chain.digest(), text_digest("The warranty lasts two years.")).hex())
print(ring.fingerprint.hex())
"""


def ids(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


fields = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=6),
    st.binary(max_size=6),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda v: np.asarray(v, dtype=np.int64)),
)


def spelled(field: object) -> tuple[str, object]:
    """The field with its type, comparable with ``==`` as the digest should compare it."""
    value = tuple(field.tolist()) if isinstance(field, np.ndarray) else field
    return type(field).__name__, value


class TestFraming:
    def test_the_border_between_fields_counts(self) -> None:
        assert framed_digest("org1", "23") != framed_digest("org12", "3")
        assert framed_digest("a", "") != framed_digest("", "a") != framed_digest("a")

    def test_tenants_that_run_together_are_kept_apart(self) -> None:
        a = replace(RING, tenant="org1", model=b"23")
        b = replace(RING, tenant="org12", model=b"3")
        assert a.key(PREFIX, TEXT) != b.key(PREFIX, TEXT)
        assert a.fingerprint != b.fingerprint

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            ("1", 1),
            ("1", b"1"),
            (1, True),
            (0, False),
            (None, ""),
            (None, b""),
            ("", b""),
            ("None", None),
            (ids(), b""),
            (ids(1), (1).to_bytes(8, "little")),
        ],
        ids=repr,
    )
    def test_the_type_counts(self, a: object, b: object) -> None:
        assert framed_digest(a) != framed_digest(b)  # type: ignore[arg-type]

    def test_a_field_cannot_spell_the_frame_of_two(self) -> None:
        frame = b"s" + (1).to_bytes(8, "little")
        assert framed_digest(b"x" + frame + b"y") != framed_digest(b"x", "y")

    @given(st.lists(fields, max_size=4), st.lists(fields, max_size=4))
    def test_equal_only_for_equal_fields(self, a: list, b: list) -> None:
        same = [spelled(f) for f in a] == [spelled(f) for f in b]
        assert (framed_digest(*a) == framed_digest(*b)) == same

    def test_how_token_ids_are_held_does_not_matter(self) -> None:
        whole = ids(*range(10))
        for held in (whole[::2], whole[::2].astype(np.int32), whole[::2].astype(">i8")):
            assert framed_digest(held) == framed_digest(ids(0, 2, 4, 6, 8))

    def test_a_lone_surrogate_has_a_digest(self) -> None:
        assert text_digest("a\ud800") != text_digest("a\ud801")

    def test_a_text_is_not_its_tokens(self) -> None:
        assert text_digest("") != tokens_digest(ids())
        assert framed_digest("text", "") != framed_digest("tokens", ids())


class TestTokenChain:
    @given(st.lists(st.integers(0, 2**40), max_size=30), st.lists(st.integers(0, 30), max_size=5))
    def test_cuts_do_not_matter(self, tokens: list[int], cuts: list[int]) -> None:
        whole, pieces = TokenChain(), TokenChain()
        whole.extend(ids(*tokens))
        for piece in np.split(ids(*tokens), sorted(min(c, len(tokens)) for c in cuts)):
            pieces.extend(piece)
        assert pieces.digest() == whole.digest()

    @given(st.lists(st.integers(0, 300), max_size=6), st.lists(st.integers(0, 300), max_size=6))
    def test_other_tokens_other_digest(self, a: list[int], b: list[int]) -> None:
        one, two = TokenChain(), TokenChain()
        one.extend(ids(*a))
        two.extend(ids(*b))
        assert (one.digest() == two.digest()) == (a == b)

    def test_taking_the_digest_does_not_end_the_chain(self) -> None:
        chain, fresh = TokenChain(), TokenChain()
        chain.extend(ids(1))
        first = chain.digest()
        assert chain.digest() == first
        chain.extend(ids(2))
        fresh.extend(ids(1, 2))
        assert chain.digest() == fresh.digest() != first


class TestKeyRing:
    @pytest.mark.parametrize(
        "change",
        [
            {"model": b"M" * 32},
            {"tokenizer": b"T" * 32},
            {"tenant": "other"},
            {"tenant": None},
            {"tenant": ""},
        ],
        ids=str,
    )
    def test_each_field_changes_key_and_fingerprint(self, change: dict) -> None:
        other = replace(RING, **change)
        assert other.key(PREFIX, TEXT) != RING.key(PREFIX, TEXT)
        assert other.fingerprint != RING.fingerprint

    def test_model_and_tokenizer_are_not_interchangeable(self) -> None:
        swapped = replace(RING, model=RING.tokenizer, tokenizer=RING.model)
        assert swapped.fingerprint != RING.fingerprint

    def test_the_shared_tenant_is_none_of_the_named(self) -> None:
        keys = {replace(RING, tenant=t).key(PREFIX, TEXT) for t in (None, "", "None", "default")}
        assert len(keys) == 4

    def test_prefix_and_text_change_the_key(self) -> None:
        moved = TokenChain()
        moved.extend(ids(1))
        keys = {
            RING.key(PREFIX, TEXT),
            RING.key(moved.digest(), TEXT),
            RING.key(PREFIX, text_digest("The warranty lasts three years.")),
            RING.key(TEXT, PREFIX),
        }
        assert len(keys) == 4

    def test_the_format_version_is_part_of_both(self, monkeypatch: pytest.MonkeyPatch) -> None:
        key, fingerprint = RING.key(PREFIX, TEXT), RING.fingerprint
        monkeypatch.setattr("rag_kvcache.keys.FORMAT_VERSION", FORMAT_VERSION + 1)
        assert RING.key(PREFIX, TEXT) != key
        assert RING.fingerprint != fingerprint

    def test_the_format_has_not_changed_unnoticed(self) -> None:
        """If this fails on purpose, raise FORMAT_VERSION and note the new values here."""
        chain = TokenChain()
        chain.extend(ids(1, 2, 3))
        assert FORMAT_VERSION == 1
        assert chain.digest().hex() == GOLDEN_CHAIN
        assert RING.key(chain.digest(), TEXT).hex() == GOLDEN_KEY

    def test_two_processes_make_the_same_key(self) -> None:
        chain = TokenChain()
        chain.extend(ids(1, 2, 3))
        here = [RING.key(chain.digest(), TEXT).hex(), RING.fingerprint.hex()]
        for seed in ("1", "4242"):
            environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
            there = subprocess.run(
                [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
            )
            assert there.stdout.split() == here


class TestCommonPrefix:
    @given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
    def test_counts_the_leading_tokens_that_agree(self, a: list[int], b: list[int]) -> None:
        expected = 0
        while expected < min(len(a), len(b)) and a[expected] == b[expected]:
            expected += 1
        assert common_prefix(ids(*a), ids(*b)) == expected
        assert common_prefix(a, b) == expected

    def test_is_a_plain_int(self) -> None:
        assert type(common_prefix(ids(1, 2), ids(1, 3))) is int
