"""Between the operator and the API server: its budget of requests, its lease, kopf's watches, and its queue of jobs."""

import asyncio
import threading
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from cormorant_operator.errors import KubeError, KubeNotFound, LeaseLost
from cormorant_operator.kube.client import KubeClient, Purpose, RateLimiter, purpose
from cormorant_operator.kube.leader import Leader
from cormorant_operator.kube.watch import Watch, run_bounded
from cormorant_operator.settings import OperatorDefaults
from cormorant_operator.work_queue import WorkQueue
from cormorant_testing.api_proxy import write_kubeconfig
from cormorant_testing.api_server import ApiServer
from cormorant_testing.clock import Clock
from cormorant_testing.scripted_head import Say, ScriptedHead

pytestmark = pytest.mark.anyio


class Requests:
    """Requests at 10 a second, and when each was sent."""

    def __init__(self, clock: Clock, *, burst: int = 1) -> None:
        self._clock, self._limiter = clock, RateLimiter(rate=10, burst=burst)
        self.sent: list[tuple[str, float]] = []

    async def send(self, name: str = "", *, of: Purpose = Purpose.PODS) -> None:
        with purpose(of):
            await self._limiter.wait()
        self.sent.append((name or of.name, round(self._clock.now, 2)))


async def test_requests_beyond_the_burst_are_spread(leaping: Clock) -> None:
    requests = Requests(leaping, burst=2)
    await asyncio.gather(*(requests.send() for _ in range(5)))
    # However long it was quiet, the bucket holds no more than the burst.
    await asyncio.sleep(9.7)
    await asyncio.gather(*(requests.send() for _ in range(4)))
    assert [at for _, at in requests.sent] == [0, 0, 0.1, 0.2, 0.3, 10, 10, 10.1, 10.2]


async def test_pods_go_before_status_before_counters_before_lists(leaping: Clock) -> None:
    requests = Requests(leaping)
    waiting = (Purpose.UPKEEP, Purpose.COUNTERS, Purpose.STATUS, Purpose.PODS, Purpose.LEASE)
    await asyncio.gather(requests.send("first"), *(requests.send(of=of) for of in waiting))
    assert [name for name, _ in requests.sent] == ["first", "LEASE", "PODS", "STATUS", "COUNTERS", "UPKEEP"]


async def test_no_request_waits_for_ever_behind_urgent_ones(leaping: Clock) -> None:
    requests = Requests(leaping)
    await requests.send()
    urgent, listing = set(), asyncio.create_task(requests.send(of=Purpose.UPKEEP))
    while not listing.done():
        urgent.add(asyncio.create_task(requests.send()))
        await asyncio.sleep(0.1)
    assert leaping.now <= Purpose.UPKEEP.value + 1


async def test_request_that_is_given_up_costs_nothing(leaping: Clock) -> None:
    requests = Requests(leaping)
    tasks = [asyncio.create_task(requests.send(name)) for name in ("first", "given up", "next")]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert requests.sent == [("first", 0), ("next", 0.1)]


def test_counters_of_1000_jobs_fit_their_share() -> None:
    defaults = OperatorDefaults(counters_per_s=35)
    assert defaults.for_jobs(100).counters_interval_s == 15
    assert round(defaults.for_jobs(1000).counters_interval_s, 1) == 28.6
    assert round(defaults.for_jobs(4000).counters_interval_s, 1) == 114.3


async def test_a_list_whose_version_is_gone_is_read_again_at_once() -> None:
    whole = {"items": [{"metadata": {}}], "metadata": {"resourceVersion": "7"}}
    begun = {**whole, "metadata": {**whole["metadata"], "continue": "2"}}
    gone = KubeError(410, {"reason": "Expired"}, request="GET pods")
    client: Any = SimpleNamespace(_ask=AsyncMock(side_effect=[begun, gone, whole]))
    assert len([page async for page in KubeClient.list(client, "Pod", selector="a=b")]) == 2
    first, second, last = (call.kwargs["query"] for call in client._ask.await_args_list)
    assert second == {**first, "continue": "2"}
    assert last == {"labelSelector": "a=b"}


@pytest.mark.parametrize(
    "said", [Say(200, b"<html>"), Say(404, b"<html>"), Say(403, b"<html>"), Say(200, b"{}"), Say(401)]
)
async def test_answer_that_is_not_the_api_servers_is_asked_again(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [said, Say(200, b'{"kind": "Pod"}'), Say(404, b"404 page not found\n")]
    with ScriptedHead(lambda _heard: answers.pop(0)) as server:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", server.url)))
        client = KubeClient(RateLimiter(rate=100, burst=100))
        assert await client.get("Pod", namespace="a", name="b") == {"kind": "Pod"}
        with pytest.raises(KubeNotFound):
            await client.get("Pod", namespace="a", name="b")
        await client.close()
    assert answers == []


class Leases(ApiServer):
    async def get(self, kind: str, **where: str) -> dict[str, Any]:
        try:
            return deepcopy(await super().get(kind, **where))
        finally:
            await asyncio.sleep(0)  # another candidate acts meanwhile


@pytest.fixture
async def leases(leaping: Clock, monkeypatch: pytest.MonkeyPatch) -> Leases:
    monkeypatch.setattr("cormorant_operator.kube.leader.time", SimpleNamespace(monotonic=leaping))
    return Leases()


def candidate(leases: Leases, identity: str) -> Leader:
    api: Any = leases
    return Leader(api, namespace="n", name="operator", identity=identity)


async def test_second_leader_waits_until_renewals_stop(leases: Leases) -> None:
    first, second = candidate(leases, "a"), candidate(leases, "b")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(60)
    assert not waiting.done()
    keeping.cancel()
    await waiting
    spec = leases.stored["Lease", "operator"]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("b", 1)
    with pytest.raises(LeaseLost, match="now held by b"):
        await first.keep()
    assert (first.is_leading, second.is_leading) == (False, True)
    first.is_leading = True  # it has not noticed yet
    await first.release()
    assert leases.stored["Lease", "operator"]["spec"]["holderIdentity"] == "b"
    await second.release()
    await asyncio.wait_for(first.acquire(), 1)


async def test_leader_gives_up_before_others_may_begin(leases: Leases, clock: Clock) -> None:
    first = candidate(leases, "a")
    await first.acquire()
    leases.is_away = True
    began = clock.now
    with pytest.raises(LeaseLost, match="could not renew lease"):
        await first.keep()
    assert clock.now - began < 15, "as long as a lease lasts"
    assert not first.is_leading


async def test_of_two_that_begin_together_one_leads(leases: Leases) -> None:
    both = [candidate(leases, name) for name in "ab"]
    tasks = [asyncio.create_task(leader.acquire()) for leader in both]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert sum(leader.is_leading for leader in both) == 1
    for task in tasks:
        task.cancel()


def test_a_task_that_will_not_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    cancelled = []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)

    async def main() -> None:
        asyncio.get_running_loop().stubborn = asyncio.create_task(stubborn())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        raise ValueError("why it ended")

    with pytest.raises(ValueError, match="why it ended"):
        run_bounded(main(), end_s=0.1)
    assert cancelled == [True]


def test_kopf_without_one_of_its_streams_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = threading.Semaphore(0)

    async def goes_on(*, stop_flag: asyncio.Event, **_: Any) -> None:
        """As kopf while other streams wait to log in again, which may last for ever."""
        ended = asyncio.create_task(asyncio.sleep(0), name="watcher for pods")
        await stop_flag.wait()
        assert ended.done()

    monkeypatch.setattr("kopf.operator", goes_on)
    watch = Watch(lambda *_, **__: None, on_gap=gaps.release)
    watch.start()
    try:
        assert gaps.acquire(timeout=60)
    finally:
        watch.stop()


# -- the queue of jobs -------------------------------------------------------------------------------------------


@pytest.fixture
def queue(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> WorkQueue:
    monkeypatch.setattr("cormorant_operator.work_queue.random.uniform", lambda low, high: (low + high) / 2)
    return WorkQueue()


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def is_empty_now(queue: WorkQueue) -> bool:
    taking = asyncio.create_task(queue.take())
    await let_others_run()
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    return taking.cancelled()


async def test_key_is_taken_once_not_while_worked_on_nor_once_forgotten(queue: WorkQueue) -> None:
    queue.add("a")
    queue.add("a")
    assert await queue.take() == "a"
    queue.add("a")
    assert await is_empty_now(queue)
    queue.done("a")
    assert await queue.take() == "a"
    queue.done("a")
    assert await is_empty_now(queue)
    queue.add("a")
    await let_others_run()  # it is ready
    queue.forget("a")
    queue.add("a", after_s=10)
    assert await is_empty_now(queue), "it waits for its new time"


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


async def test_longest_wait_is_that_of_the_first_due_key(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    queue.add("b", after_s=50)
    clock.now = 30.0
    assert (queue.num_due, queue.longest_wait_s) == (1, 30.0)
    await queue.take()
    assert (queue.num_due, queue.longest_wait_s) == (0, 0.0)
