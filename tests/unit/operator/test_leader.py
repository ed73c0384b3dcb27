"""Election by a Lease."""

import asyncio
from typing import Any

import pytest

from cormorant_operator.errors import LeaseLost
from cormorant_operator.kube.leader import Leader
from cormorant_testing.api_server import ApiServer

pytestmark = pytest.mark.anyio
LASTS_S = 0.3


class Leases(ApiServer):
    @property
    def lease(self) -> dict[str, Any]:
        return self.stored["Lease", "operator"]

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"])


def candidate(leases: Leases, identity: str) -> Leader:
    api: Any = leases
    times = {"lasts_s": LASTS_S, "renew_within_s": 0.2, "retry_s": 0.02}
    return Leader(api, namespace="n", name="operator", identity=identity, **times)


async def test_second_leader_waits_until_renewals_stop() -> None:
    leases = Leases()
    first, second = candidate(leases, "a"), candidate(leases, "b")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.6)
    assert not waiting.done()
    keeping.cancel()
    await waiting
    assert (leases.holder, second.is_leading) == ("b", True)
    assert leases.lease["spec"]["leaseTransitions"] == 1


async def test_released_lease_is_taken_at_once() -> None:
    leases = Leases()
    first, second = candidate(leases, "a"), candidate(leases, "b")
    await first.acquire()
    await first.release()
    await asyncio.wait_for(second.acquire(), 0.2)
    assert leases.holder == "b"


async def test_leader_gives_up_before_others_may_begin() -> None:
    leases = Leases()
    first = candidate(leases, "a")
    await first.acquire()
    leases.is_away = True
    began = asyncio.get_running_loop().time()
    with pytest.raises(LeaseLost, match="could not renew lease"):
        await first.keep()
    assert asyncio.get_running_loop().time() - began < LASTS_S
    assert not first.is_leading


async def test_leader_that_lost_its_lease_knows() -> None:
    leases = Leases()
    first = candidate(leases, "a")
    await first.acquire()
    leases.keep({**leases.lease, "spec": {**leases.lease["spec"], "holderIdentity": "b", "renewTime": "now"}})
    with pytest.raises(LeaseLost, match="now held by b"):
        await first.keep()


async def test_of_two_that_begin_together_one_leads() -> None:
    leases = Leases()
    both = [candidate(leases, name) for name in "ab"]
    tasks = [asyncio.create_task(leader.acquire()) for leader in both]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert sum(leader.is_leading for leader in both) == 1
    for task in tasks:
        task.cancel()
