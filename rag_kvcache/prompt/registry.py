"""Texts seen lately, per tenant: what to look for in a prompt that comes without documents."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from cachetools import Cache, LRUCache

from rag_kvcache.prompt.locate import Locator
from rag_kvcache.segment import Document


class KnownDocuments:
    """A bounded memory of documents per tenant, the least recently seen forgotten first.

    max_entries: documents kept per tenant; 0 keeps none.
    max_tenants: tenants kept.
    """

    def __init__(self, max_entries: int, *, max_tenants: int = 1024) -> None:
        self._max_entries = max_entries
        self._lock = Lock()
        self._tenants: LRUCache[str, _Shelf] = LRUCache(max_tenants)

    def remember(self, documents: Iterable[Document], tenant: str) -> None:
        """Add documents, or note that they were seen again."""
        if not self._max_entries:
            return
        with self._lock:
            shelf = self._tenants.get(tenant)
            if shelf is None:
                shelf = self._tenants[tenant] = _Shelf(self._max_entries)
            shelf.add(documents)

    def locator(self, tenant: str) -> Locator:
        """Searches for all documents this tenant is known to have."""
        with self._lock:
            shelf = self._tenants.get(tenant)
            return Locator(()) if shelf is None else shelf.locator()

    def labelled(self, label: str, tenant: str) -> tuple[str, ...]:
        """The texts known under an id."""
        with self._lock:
            shelf = self._tenants.get(tenant)
            return () if shelf is None else shelf.labelled(label)

    def forget(self, tenant: str, *, text: str | None = None, label: str | None = None) -> None:
        """Forget the documents with this text or id; without either, all of the tenant's."""
        with self._lock:
            shelf = self._tenants.get(tenant)
            if shelf is None:
                return
            if text is None and label is None:
                del self._tenants[tenant]
            else:
                shelf.drop(text, label)


class _Shelf:
    """One tenant's documents, and the locator for them, rebuilt when they changed."""

    def __init__(self, max_entries: int) -> None:
        self._documents: LRUCache[str, Document] = LRUCache(max_entries)
        self._locator: Locator | None = None

    def add(self, documents: Iterable[Document]) -> None:
        for document in documents:
            if self._documents.get(document.text) != document:
                self._locator = None
            self._documents[document.text] = document

    def locator(self) -> Locator:
        if self._locator is None:
            self._locator = Locator(self._untouched())
        return self._locator

    def drop(self, text: str | None, label: str | None) -> None:
        gone = [d for d in self._untouched() if d.text == text or (label is not None and d.id == label)]
        for document in gone:
            del self._documents[document.text]
        self._locator = None if gone else self._locator

    def labelled(self, label: str) -> tuple[str, ...]:
        return tuple(d.text for d in self._untouched() if d.id == label)

    def _untouched(self) -> list[Document]:
        """All documents; unlike ``values``, which makes what it visits the most recently used."""
        return [Cache.__getitem__(self._documents, text) for text in self._documents]
