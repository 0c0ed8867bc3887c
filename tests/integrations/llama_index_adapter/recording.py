"""An engine that writes down what the adapter asks of it, and an embedding that needs no model."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from llama_index.core.embeddings import BaseEmbedding

from rag_kvcache.engine import Engine
from rag_kvcache.report import Chunk, Generation


class RecordingEngine(Engine):
    """A real engine, whose agenerate goes through astream.

    calls: prompt and keyword arguments of each request; generations: what came back.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.generations: list[Generation] = []

    def generate(self, prompt: Any, **kwargs: Any) -> Generation:
        self.calls.append((prompt, kwargs))
        generation = super().generate(prompt, **kwargs)
        self.generations.append(generation)
        return generation

    def stream(self, prompt: Any, **kwargs: Any) -> Iterator[Chunk]:
        self.calls.append((prompt, kwargs))
        for chunk in super().stream(prompt, **kwargs):
            if chunk.generation is not None:
                self.generations.append(chunk.generation)
            yield chunk

    async def astream(self, prompt: Any, **kwargs: Any) -> AsyncIterator[Chunk]:
        self.calls.append((prompt, kwargs))
        async for chunk in super().astream(prompt, **kwargs):
            if chunk.generation is not None:
                self.generations.append(chunk.generation)
            yield chunk

    @property
    def documents(self) -> list[list[str]]:
        """The candidates' texts of each request."""
        return [[d.text for d in kwargs["documents"]] for _, kwargs in self.calls]


class WordEmbedding(BaseEmbedding):
    """Counts words into 256 buckets: texts that share words are near each other."""

    def _vector(self, text: str) -> list[float]:
        vector = [0.0] * 256
        for word in text.lower().split():
            vector[zlib.crc32(word.strip(".,?!:").encode()) % 256] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._vector(text)


KETTLE = (
    "The kettle K2 has a warranty of two years from the day of purchase. Keep the receipt: without it the "
    "warranty is void. Descale the kettle every month with citric acid, and never put it under running water."
)
SHIPPING = (
    "Shipping is free above 50 euros and costs 4.90 euros below. Parcels leave the warehouse on the same "
    "day when the order comes in before noon. Islands take three days longer. 退货需要在三十天内完成。"
)
LAMP = (
    "The lamp Luna takes bulbs of up to 40 watts with an E14 thread. It is not dimmable. A broken switch is "
    "replaced free of charge in the first six months, later for 12 euros and the postage."
)
TEXTS = (KETTLE, SHIPPING, LAMP)


def document_share(generation: Generation) -> float:
    """Share of the documents' tokens that came from the cache."""
    segments = list(generation.report.of_kind("document"))
    assert segments, generation.report
    return sum(s.reused for s in segments) / sum(s.tokens for s in segments)
