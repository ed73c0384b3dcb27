"""The client for asyncio: what is cancelled, and when."""

import asyncio
import threading
from typing import Any

from cormorant_client.aio import AsyncBatches


class Numbers:
    """Batches that come when they may; each is acknowledged by the call after it."""

    def __init__(self) -> None:
        self.acked: list[int] = []
        self.released: list[int] = []
        self.is_asked, self.may_come = threading.Event(), threading.Event()
        self._last = -1

    def __next__(self) -> int:
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


async def cancelled(batches: AsyncBatches, numbers: Numbers) -> None:
    """Await a batch, and give up before it comes."""
    task: asyncio.Future[Any] = asyncio.ensure_future(anext(batches))
    await asyncio.to_thread(numbers.is_asked.wait, 20)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def test_a_batch_whose_await_was_cancelled_comes_to_the_next() -> None:
    async def run() -> None:
        numbers = Numbers()
        batches = AsyncBatches(numbers, asyncio.to_thread)  # type: ignore[arg-type]  # what it calls
        await cancelled(batches, numbers)
        numbers.may_come.set()
        assert await anext(batches) == 0
        assert numbers.acked == [], "it was seen only now"
        assert await anext(batches) == 1
        assert numbers.acked == [0]

    asyncio.run(run())


def test_a_batch_that_nobody_saw_is_released_at_the_end() -> None:
    async def run() -> None:
        numbers = Numbers()
        batches = AsyncBatches(numbers, asyncio.to_thread)  # type: ignore[arg-type]  # what it calls
        async with batches:
            await cancelled(batches, numbers)
            numbers.may_come.set()
        assert (numbers.acked, len(numbers.released)) == ([], 1)

    asyncio.run(run())
