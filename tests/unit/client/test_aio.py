"""The client for asyncio: what is cancelled, and when."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cormorant_client.aio import AsyncBatches, AsyncPause


class Numbers:
    """Batches that come when they may; each is acknowledged by the call after it."""

    def __init__(self) -> None:
        self.acked: list[int] = []
        self.released: list[int] = []
        self.is_asked, self.may_come = threading.Event(), threading.Event()
        self._last = -1

    def next(self) -> int:
        if self._last >= 0:
            self.acked.append(self._last)
        self.is_asked.set()
        assert self.may_come.wait(20)
        self._last += 1
        return self._last

    def close(self) -> None:
        self.released.append(self._last)

    def __exit__(self, *_: object) -> None:
        self.acked.append(self._last)


async def cancelled(awaited: Any, is_asked: threading.Event | None = None) -> None:
    """Await something, and give up before it comes."""
    task: asyncio.Future[Any] = asyncio.ensure_future(awaited)
    await (asyncio.sleep(0) if is_asked is None else asyncio.to_thread(is_asked.wait, 20))
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def test_a_batch_whose_await_was_cancelled_comes_to_the_next() -> None:
    async def run() -> None:
        numbers = Numbers()
        batches = AsyncBatches(numbers, asyncio.to_thread)  # type: ignore[arg-type]  # what it calls
        await cancelled(anext(batches), numbers.is_asked)
        numbers.may_come.set()
        assert await anext(batches) == 0
        assert numbers.acked == [], "it was seen only now"
        assert await anext(batches) == 1
        assert numbers.acked == [0]

    asyncio.run(run())


def test_a_batch_that_nobody_saw_is_released_at_the_end() -> None:
    async def run() -> None:
        numbers = Numbers()
        async with AsyncBatches(numbers, asyncio.to_thread) as batches:  # type: ignore[arg-type]  # what it calls
            await cancelled(anext(batches), numbers.is_asked)
            numbers.may_come.set()
        assert (numbers.acked, len(numbers.released)) == ([], 1)

    asyncio.run(run())


class Lease:
    """A pause that the head grants when it may."""

    def __init__(self) -> None:
        self.is_asked, self.may_come, self.is_resumed = threading.Event(), threading.Event(), threading.Event()

    def begin(self) -> "Lease":
        self.is_asked.set()
        assert self.may_come.wait(20)
        return self

    def __enter__(self) -> "Lease":
        return self

    def resume(self) -> None:
        self.is_resumed.set()


def test_a_pause_whose_await_was_cancelled_is_given_back() -> None:
    lease = Lease()
    with ThreadPoolExecutor(2) as pool:
        pause = AsyncPause(lease.begin, pool)  # type: ignore[arg-type]  # what it calls
        asyncio.run(cancelled(pause.__aenter__(), lease.is_asked))
        assert not lease.is_resumed.is_set(), "the head has not granted it"
        lease.may_come.set()
        assert lease.is_resumed.wait(20)


def test_a_pause_whose_end_was_cancelled_is_given_back() -> None:
    async def run() -> None:
        pause = AsyncPause(lease.begin, pool)  # type: ignore[arg-type]  # what it calls
        await pause.__aenter__()
        pool.submit(is_free.wait, 20)  # resuming waits for the only thread
        await cancelled(pause.__aexit__())

    lease, is_free = Lease(), threading.Event()
    lease.may_come.set()
    with ThreadPoolExecutor(1) as pool:
        asyncio.run(run())
        is_free.set()
    assert lease.is_resumed.is_set()
