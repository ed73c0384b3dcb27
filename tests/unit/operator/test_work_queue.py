"""Keys, due times, delays after failures; with a clock of our own."""

import asyncio

import pytest

from cormorant_operator.work_queue import WorkQueue
from cormorant_testing.clock import Clock

pytestmark = pytest.mark.anyio


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The event loop's clock, moved by hand."""
    loop, clock = asyncio.get_running_loop(), Clock()
    monkeypatch.setattr(loop, "time", clock)
    return clock


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(jitter=lambda: 1.0)


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def is_empty_now(queue: WorkQueue) -> bool:
    taking = asyncio.create_task(queue.take())
    await let_others_run()
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    return taking.cancelled()


async def test_key_that_is_added_twice_is_taken_once(queue: WorkQueue) -> None:
    queue.add("a")
    queue.add("a")
    assert await queue.take() == "a"
    queue.done("a")
    assert await is_empty_now(queue)


async def test_key_that_is_worked_on_is_not_taken_by_another(queue: WorkQueue) -> None:
    queue.add("a")
    await queue.take()
    queue.add("a")
    assert await is_empty_now(queue)
    queue.done("a")
    assert await queue.take() == "a"


async def test_earlier_time_wins_and_keys_come_in_order(queue: WorkQueue, clock: Clock) -> None:
    queue.add("late", after_s=20)
    queue.add("early", after_s=10)
    queue.add("late", after_s=30)
    assert await is_empty_now(queue)
    clock.now = 20.0
    assert [await queue.take(), await queue.take()] == ["early", "late"]


async def test_failures_in_a_row_wait_longer_and_success_forgets_them(queue: WorkQueue, clock: Clock) -> None:
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


async def test_forgotten_key_that_comes_back_waits_for_its_new_time(queue: WorkQueue) -> None:
    queue.add("a")
    await let_others_run()  # it is ready
    queue.forget("a")
    queue.add("a", after_s=10)
    assert await is_empty_now(queue)


async def test_longest_wait_is_forgotten_after_two_minutes(queue: WorkQueue, clock: Clock) -> None:
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
