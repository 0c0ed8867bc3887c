"""The memory of texts seen: bounded, one shelf per tenant."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rag_kvcache.prompt.registry import KnownDocuments
from rag_kvcache.segment import Document


def known(memory: KnownDocuments, tenant: str, text: str = "A B C D E F") -> str:
    """What of ``text`` this tenant's documents are found in, joined."""
    return "".join(text[f.start : f.stop] for f in memory.locator(tenant).find(text))


def docs(names: str) -> list[Document]:
    return [Document(name, id=f"id-{name}") for name in names]


class TestBounds:
    def test_the_least_recently_seen_is_forgotten_first(self) -> None:
        memory = KnownDocuments(2)
        memory.remember(docs("ABC"), "t")
        assert known(memory, "t") == "BC"

    def test_seen_again_is_young_again(self) -> None:
        memory = KnownDocuments(2)
        memory.remember(docs("AB"), "t")
        memory.remember(docs("A"), "t")
        memory.remember(docs("C"), "t")
        assert known(memory, "t") == "AC"

    def test_searching_is_not_seeing(self) -> None:
        memory = KnownDocuments(2)
        memory.remember(docs("ABA"), "t")
        known(memory, "t")
        memory.remember(docs("C"), "t")
        assert known(memory, "t") == "AC"

    def test_forgetting_one_leaves_the_order_of_the_others(self) -> None:
        memory = KnownDocuments(3)
        memory.remember(docs("ABCA"), "t")
        memory.forget("t", text="C")
        memory.remember(docs("DE"), "t")
        assert known(memory, "t") == "ADE"

    def test_zero_keeps_none(self) -> None:
        memory = KnownDocuments(0)
        memory.remember(docs("A"), "t")
        assert known(memory, "t") == ""

    def test_tenants_are_bounded_too(self) -> None:
        memory = KnownDocuments(5, max_tenants=2)
        for tenant in ("t1", "t2", "t3"):
            memory.remember(docs("A"), tenant)
        assert [known(memory, tenant) for tenant in ("t1", "t2", "t3")] == ["", "A", "A"]


class TestTenants:
    def test_never_see_each_others_texts(self) -> None:
        memory = KnownDocuments(5)
        memory.remember(docs("A"), "one")
        memory.remember(docs("B"), "two")
        assert known(memory, "one") == "A"
        assert known(memory, "two") == "B"
        assert known(memory, "three") == ""

    def test_forget_apart(self) -> None:
        memory = KnownDocuments(5)
        memory.remember(docs("A"), "one")
        memory.remember(docs("A"), "two")
        memory.forget("one", text="A")
        assert known(memory, "one") == ""
        assert known(memory, "two") == "A"


class TestForgetting:
    def test_by_text(self) -> None:
        memory = KnownDocuments(5)
        memory.remember(docs("AB"), "t")
        known(memory, "t")
        memory.forget("t", text="A")
        assert known(memory, "t") == "B"

    def test_by_label(self) -> None:
        memory = KnownDocuments(5)
        memory.remember(docs("AB"), "t")
        memory.forget("t", label="id-B")
        assert known(memory, "t") == "A"

    def test_by_a_label_that_nobody_has_leaves_those_without(self) -> None:
        memory = KnownDocuments(5)
        memory.remember([Document("A")], "t")
        memory.forget("t", text="nothing")
        memory.forget("t", label="nothing")
        assert known(memory, "t") == "A"

    def test_all(self) -> None:
        memory = KnownDocuments(5)
        memory.remember(docs("AB"), "t")
        memory.forget("t")
        memory.forget("a tenant never seen")
        assert known(memory, "t") == ""


class TestUpdates:
    def test_a_new_label_for_a_known_text_is_taken(self) -> None:
        memory = KnownDocuments(5)
        memory.remember([Document("A", id="old")], "t")
        known(memory, "t")
        memory.remember([Document("A", id="new")], "t")
        assert [f.document.id for f in memory.locator("t").find("A")] == ["new"]

    def test_an_unchanged_shelf_keeps_its_locator(self) -> None:
        memory = KnownDocuments(5)
        memory.remember(docs("AB"), "t")
        first = memory.locator("t")
        memory.remember(docs("BA"), "t")
        assert memory.locator("t") is first
        memory.remember(docs("C"), "t")
        assert memory.locator("t") is not first

    def test_metadata_may_hold_anything(self) -> None:
        """Retrievers put embeddings there, whose comparison is no yes or no."""
        memory = KnownDocuments(5)
        for _ in range(2):
            memory.remember([Document("A", metadata={"embedding": np.zeros(3)})], "t")
        assert known(memory, "t") == "A"


def test_many_threads_at_once() -> None:
    memory = KnownDocuments(4)

    def work(n: int) -> None:
        for m in range(50):
            memory.remember(docs("ABCDEF"[m % 6]), f"t{n % 2}")
            assert len(known(memory, f"t{n % 2}")) <= 4
            if m % 10 == 9:
                memory.forget(f"t{n % 2}", text="A")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
