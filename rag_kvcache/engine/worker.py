"""Runs a generation in a thread of its own and hands over its text as it comes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Generator
from queue import SimpleQueue
from threading import Event, Thread

from rag_kvcache.report import Chunk, Generation

Emit = Callable[[str], None]
Job = Callable[[Emit, Event], Generation | None]
"""A generation: called with where to send text and a flag that tells it to stop. None when stopped early."""

_Item = Chunk | BaseException | None


def stream(job: Job) -> Generator[Chunk, None, None]:
    """Run ``job``; yields its text, then its result. Closing the iterator stops the job."""
    queue: SimpleQueue[_Item] = SimpleQueue()
    cancelled = _start(job, queue.put)
    try:
        while (item := queue.get()) is not None:
            yield _checked(item)
    finally:
        cancelled.set()


async def astream(job: Job) -> AsyncGenerator[Chunk]:
    """``stream`` for an event loop, which is never blocked. Cancelling the task stops the job."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[_Item]()

    def post(item: _Item) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, item)

    cancelled = _start(job, post)
    try:
        while (item := await queue.get()) is not None:
            yield _checked(item)
    finally:
        cancelled.set()


def _start(job: Job, post: Callable[[_Item], None]) -> Event:
    """Start ``job`` in a thread that posts chunks, then None; or the exception that ended it."""
    cancelled = Event()

    def run() -> None:
        try:
            generation = job(lambda text: post(Chunk(text)), cancelled)
            if generation is not None:
                post(Chunk("", generation))
            post(None)
        except BaseException as e:  # handed to the consumer, in whose thread it belongs
            if not cancelled.is_set():
                post(e)

    # The caller's context goes along, so that tracing and logging see whose request it is.
    context = contextvars.copy_context()
    Thread(target=context.run, args=(run,), name="rag-kvcache-generate").start()
    return cancelled


def _checked(item: Chunk | BaseException) -> Chunk:
    if isinstance(item, BaseException):
        raise item
    return item
