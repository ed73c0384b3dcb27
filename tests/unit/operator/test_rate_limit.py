"""The budget of requests: how many, and who goes first."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cormorant_operator.defaults import OperatorDefaults
from cormorant_operator.kube.rate_limit import Purpose, RateLimiter, purpose
from cormorant_testing.clock import Clock

pytestmark = pytest.mark.anyio


class Bench:
    """A pace of 10 a second under a clock that is moved by hand, and the order in which requests went."""

    def __init__(self, *, burst: int) -> None:
        self.clock, self.sent = Clock(), list[str]()
        self.pace = RateLimiter(rate=10, burst=burst, clock=self.clock)
        self.tasks: list[asyncio.Task[None]] = []
        self._told = 0

    async def ask(self, name: str, *, of: Purpose) -> asyncio.Task[None]:
        async def send() -> None:
            with purpose(of):
                await self.pace.wait()
            self.sent.append(name)

        self.tasks.append(asyncio.create_task(send()))
        await asyncio.sleep(0)
        return self.tasks[-1]

    async def pass_time(self, seconds: float) -> list[str]:
        """What went since this was called last."""
        self.clock.now += seconds
        self.pace.hand_out()
        for _ in range(3):
            await asyncio.sleep(0)
        self._told, told = len(self.sent), self._told
        return self.sent[told:]


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench(burst=getattr(request, "param", 1))
    yield bench
    for task in bench.tasks:
        task.cancel()
    await asyncio.gather(*bench.tasks, return_exceptions=True)


@pytest.mark.parametrize("bench", [2], indirect=True)
async def test_requests_beyond_the_burst_are_spread(bench: Bench) -> None:
    for name in "abcde":
        await bench.ask(name, of=Purpose.PODS)
    assert await bench.pass_time(0) == ["a", "b"]
    assert await bench.pass_time(0.1) == ["c"]
    assert await bench.pass_time(0.05) == []
    assert await bench.pass_time(0.05) == ["d"]
    assert await bench.pass_time(10) == ["e"]
    # However long it was quiet, the bucket holds no more than the burst.
    assert await bench.pass_time(10) == []
    for name in "fghi":
        await bench.ask(name, of=Purpose.PODS)
    assert await bench.pass_time(0) == ["f", "g"]


async def test_pods_go_before_status_before_counters_before_lists(bench: Bench) -> None:
    await bench.ask("first", of=Purpose.UPKEEP)
    await bench.pass_time(0)
    for of in (Purpose.UPKEEP, Purpose.COUNTERS, Purpose.STATUS, Purpose.PODS, Purpose.LEASE):
        await bench.ask(of.name, of=of)
    went = [name for _ in range(5) for name in await bench.pass_time(0.1)]
    assert went == ["LEASE", "PODS", "STATUS", "COUNTERS", "UPKEEP"]


async def test_no_request_waits_for_ever_behind_urgent_ones(bench: Bench) -> None:
    await bench.ask("first", of=Purpose.PODS)
    await bench.ask("a list", of=Purpose.UPKEEP)
    waited = 0
    while "a list" not in bench.sent:
        await bench.ask("pod", of=Purpose.PODS)
        await bench.pass_time(0.1)
        waited += 1
    assert waited * 0.1 <= Purpose.UPKEEP.value + 1


async def test_request_that_is_given_up_costs_nothing(bench: Bench) -> None:
    await bench.ask("first", of=Purpose.PODS)
    given_up = await bench.ask("given up", of=Purpose.PODS)
    await bench.ask("next", of=Purpose.PODS)
    given_up.cancel()
    assert await bench.pass_time(0.1) == ["first", "next"]


def test_counters_of_1000_jobs_fit_their_share() -> None:
    defaults = OperatorDefaults(counters_per_s=35)
    assert defaults.for_jobs(100).counters_interval_s == 15
    assert round(defaults.for_jobs(1000).counters_interval_s, 1) == 28.6
    assert round(defaults.for_jobs(4000).counters_interval_s, 1) == 114.3
