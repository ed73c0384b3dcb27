"""Election by a Lease, with a fake of the two or three requests that it needs."""

import asyncio
from collections.abc import Coroutine
from copy import deepcopy
from typing import Any

import pytest

from cormorant_operator.errors import Conflict, LeaseLost, NotFound, Unreachable
from cormorant_operator.kube.leader import Leader, Terms

TERMS = Terms(lasts_s=0.3, renew_within_s=0.2, retry_s=0.02)


class FakeLeases:
    """One Lease, with the API server's optimistic locking."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.is_away = False

    async def get(self, kind: str, *, namespace: str, name: str) -> dict[str, Any]:
        self._answer()
        if self.lease is None:
            raise NotFound(404, {}, request="GET lease")
        return deepcopy(self.lease)

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        if self.lease is not None:
            raise Conflict(409, {"reason": "AlreadyExists"}, request="POST lease")
        return self._store(manifest, 1)

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        assert self.lease is not None
        version = self.lease["metadata"]["resourceVersion"]
        if manifest["metadata"]["resourceVersion"] != version:
            raise Conflict(409, {}, request="PUT lease")
        return self._store(manifest, version + 1)

    def _answer(self) -> None:
        if self.is_away:
            raise Unreachable("nobody there")

    def _store(self, manifest: dict[str, Any], version: int) -> dict[str, Any]:
        metadata = {**manifest["metadata"], "resourceVersion": version}
        self.lease = {**deepcopy(manifest), "metadata": metadata}
        return self.lease

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


def candidate(leases: FakeLeases, identity: str) -> Leader:
    loop = asyncio.get_running_loop()
    return Leader(leases, namespace="n", name="operator", identity=identity, terms=TERMS, clock=loop.time)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_second_leader_waits_until_renewals_stop() -> None:
    async def test() -> None:
        leases = FakeLeases()
        first, second = candidate(leases, "a"), candidate(leases, "b")
        await first.acquire()
        keeping = asyncio.create_task(first.keep())
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(0.6)
        assert not waiting.done()
        keeping.cancel()
        await waiting
        assert (leases.holder, second.is_leading) == ("b", True)
        assert leases.lease is not None
        assert leases.lease["spec"]["leaseTransitions"] == 1

    run(test())


def test_released_lease_is_taken_at_once() -> None:
    async def test() -> None:
        leases = FakeLeases()
        first, second = candidate(leases, "a"), candidate(leases, "b")
        await first.acquire()
        await first.release()
        await asyncio.wait_for(second.acquire(), 0.2)
        assert leases.holder == "b"

    run(test())


def test_leader_gives_up_before_others_may_begin() -> None:
    async def test() -> None:
        leases = FakeLeases()
        first = candidate(leases, "a")
        await first.acquire()
        leases.is_away = True
        began = asyncio.get_running_loop().time()
        with pytest.raises(LeaseLost, match="could not renew lease"):
            await first.keep()
        assert asyncio.get_running_loop().time() - began < TERMS.lasts_s
        assert not first.is_leading

    run(test())


def test_leader_that_lost_its_lease_knows() -> None:
    async def test() -> None:
        leases = FakeLeases()
        first = candidate(leases, "a")
        await first.acquire()
        assert leases.lease is not None
        leases.lease["spec"] |= {"holderIdentity": "b", "renewTime": "now"}
        leases.lease["metadata"]["resourceVersion"] += 1
        with pytest.raises(LeaseLost, match="now held by b"):
            await first.keep()

    run(test())


def test_of_two_that_begin_together_one_leads() -> None:
    async def test() -> None:
        leases = FakeLeases()
        both = [candidate(leases, name) for name in "ab"]
        tasks = [asyncio.create_task(leader.acquire()) for leader in both]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert sum(leader.is_leading for leader in both) == 1
        for task in tasks:
            task.cancel()

    run(test())
