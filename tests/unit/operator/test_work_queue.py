"""Keys, due times, delays after failures; with a clock of our own."""

import asyncio

import pytest

from cormorant_operator.work_queue import WorkQueue
from cormorant_testing.clock import Clock

pytestmark = pytest.mark.anyio


def make_queue() -> tuple[WorkQueue, Clock]:
    clock = Clock()
    return WorkQueue(clock=clock, jitter=lambda: 1.0), clock


async def is_empty_now(queue: WorkQueue) -> bool:
    try:
        await asyncio.wait_for(queue.take(), 0.01)
    except TimeoutError:
        return True
    return False


async def test_key_that_is_added_twice_is_taken_once() -> None:
    queue, _ = make_queue()
    queue.add("a")
    queue.add("a")
    assert await queue.take() == "a"
    queue.done("a")
    assert await is_empty_now(queue)


async def test_key_that_is_worked_on_is_not_taken_by_another() -> None:
    queue, _ = make_queue()
    queue.add("a")
    await queue.take()
    queue.add("a")
    assert await is_empty_now(queue)
    queue.done("a")
    assert await queue.take() == "a"


async def test_earlier_time_wins_and_keys_come_in_order() -> None:
    queue, clock = make_queue()
    queue.add("late", after_s=20)
    queue.add("early", after_s=10)
    queue.add("late", after_s=30)
    assert await is_empty_now(queue)
    clock.now = 20.0
    assert [await queue.take(), await queue.take()] == ["early", "late"]


async def test_failures_in_a_row_wait_longer_and_success_forgets_them() -> None:
    queue, clock = make_queue()
    delays = []
    queue.add("a")
    for _ in range(12):
        await queue.take()
        queue.add("a")  # an event meanwhile does not get around the delay
        delays.append(queue.failed("a"))
        assert await is_empty_now(queue)
        clock.now += delays[-1]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == 300.0
    await queue.take()
    queue.done("a")
    queue.add("a")
    await queue.take()
    assert queue.failed("a") == 0.5


async def test_forgotten_key_is_not_taken() -> None:
    queue, _ = make_queue()
    queue.add("a")
    queue.forget("a")
    assert await is_empty_now(queue)


async def test_waiting_taker_wakes_when_something_is_added() -> None:
    queue, _ = make_queue()
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("a")
    assert await taking == "a"


async def test_key_that_was_given_to_a_worker_who_ends_goes_to_the_next() -> None:
    queue, _ = make_queue()
    ending = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("a")  # it is given the key, and is cancelled before it can know
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    assert ending.cancelled()
    assert await queue.take() == "a"


async def test_workers_who_wait_end_when_they_are_told_to() -> None:
    queue = WorkQueue()
    takers = [asyncio.create_task(queue.take()) for _ in range(4)]
    await asyncio.sleep(0)
    queue.add("a", after_s=0.01)
    await asyncio.sleep(0.01)
    for taker in takers:
        taker.cancel()
    _, left = await asyncio.wait(takers, timeout=1)
    assert left == set()


async def test_one_key_wakes_one_worker_the_first_to_wait() -> None:
    queue, _ = make_queue()
    takers = [asyncio.create_task(queue.take()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.add("a")
    done, waiting = await asyncio.wait(takers, timeout=0.05)
    assert done == {takers[0]}
    assert len(waiting) == 2
    for taker in waiting:
        taker.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_longest_wait_is_forgotten_after_two_minutes() -> None:
    queue, clock = make_queue()
    queue.add("a")
    clock.now = 30.0
    await queue.take()
    queue.done("a")
    assert queue.longest_wait_s == 30.0
    clock.now = 70.0
    queue.add("b")
    clock.now = 72.0
    await queue.take()
    assert queue.longest_wait_s == 30.0
    clock.now = 130.0
    assert queue.longest_wait_s == 2.0
    clock.now = 180.0
    assert queue.longest_wait_s == 0.0
