"""Entries: a key alone is never trusted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiers.contract import entry

A = entry("a", 4, fingerprint=b"F", prefix=b"P", start=7)


def ids(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


class TestUsableTokens:
    def test_all_when_all_agrees(self) -> None:
        assert A.usable_tokens(b"F", b"P", 7, ids(0, 1, 2, 3)) == 4

    @pytest.mark.parametrize(
        ("wanted", "usable"),
        [
            ((0, 1, 2, 9), 3),
            ((9, 1, 2, 3), 0),
            ((0, 1), 2),
            ((0, 1, 2, 3, 4, 5), 4),
            ((), 0),
        ],
        ids=str,
    )
    def test_else_the_common_beginning(self, wanted: tuple[int, ...], usable: int) -> None:
        assert A.usable_tokens(b"F", b"P", 7, ids(*wanted)) == usable

    @pytest.mark.parametrize(
        ("fingerprint", "prefix", "start"),
        [(b"other", b"P", 7), (b"F", b"other", 7), (b"F", b"P", 8), (b"F", b"P", 0)],
        ids=["fingerprint", "prefix", "offset", "no offset"],
    )
    def test_none_of_a_foreign_entry(self, fingerprint: bytes, prefix: bytes, start: int) -> None:
        assert A.usable_tokens(fingerprint, prefix, start, ids(0, 1, 2, 3)) == 0


def test_bytes_are_those_of_the_storage_not_of_the_view() -> None:
    whole = torch.zeros(1, 1, 100, 1)
    view = entry("a", 2)
    object.__setattr__(view, "planes", (whole[:, :, :2],))
    assert view.nbytes == whole.untyped_storage().nbytes() == 400


def test_tokens_are_counted() -> None:
    assert entry("a", 5).tokens == 5
