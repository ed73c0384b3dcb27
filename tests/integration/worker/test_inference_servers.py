"""Fleets whose policy acts in inference servers: exact frames, versions and streams, whatever dies."""

import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cormorant_testing.collecting import make_job, scene
from cormorant_testing.fleets import balance, make_fleet, served
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import until
from cormorant_worker.errors import FleetError, LastWorker, WorkerFailed
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions, RayOptions
from cormorant_worker.fleet.ray.engine import RayConnection, RayEngine
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.worker.messages import Listening, Start

OPTIONS = {"lengths": (3, 1, 7), "ends": "alternate"}


def kill_server(fleet: WorkerFleet, index: int = 0, *, sent: signal.Signals = signal.SIGKILL) -> int:
    pid = next(worker.pid for worker in fleet.stats().workers if worker.name == f"act-{index}")
    os.kill(pid, sent)
    return pid


@pytest.mark.parametrize(("workers", "total", "servers"), [(1, 107, 1), (2, 400, 2)])
def test_served_fleet_delivers_every_frame_exactly(workers: int, total: int, servers: int) -> None:
    job, checker = scene("counter", collection={"totalFrames": total, "initRandomFrames": 8}, **OPTIONS)
    random_frames = 0
    with make_fleet(served(job, servers=servers), workers=workers) as fleet:
        for batch in LocalFleet(fleet).batches():
            checker.take(batch)
            real = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
            random_frames += int((batch["collector", "policy_version"][real] == -1).sum())
        assert (checker.frames, fleet.stats().frames, random_frames) == (total, total, 8)
        assert fleet.is_done
        # Every frame that is not a random one was a row at a server; at two, where a worker moved to the later one.
        until(lambda: not fleet.stats().workers)
        rows = sum(served["rows"] for served in fleet.stats().inference.values())
        assert rows == total - random_frames or (servers > 1 and rows > total - random_frames)
        assert balance(fleet) == 0
    assert checker.attempts == {(0, index, 0) for index in range(workers)}


def test_weights_go_to_servers_alone_and_every_row_names_its_version() -> None:
    job, checker = scene("versioned", collection={"totalFrames": 3000}, step_s=0.0005)
    with make_fleet(served(job, servers=2), workers=2, starts_paused=True) as fleet:
        assert sorted(fleet.specs["policy"]) == ["bias", "number"]
        receipt = fleet.publish(numbered(1), wait_s=30)
        assert (receipt.applied, receipt.waiting, dict(receipt.refused)) == (("act-0", "act-1"), (), {})
        with pytest.raises(FleetError, match="no policy acts in worker cpu-0"):
            fleet.publish(numbered(1), workers=["cpu-0"])
        fleet.resume()
        seen = set()
        for number, batch in enumerate(LocalFleet(fleet).batches()):
            checker.take(batch)
            seen |= set(np.unique(batch["collector", "policy_version"].numpy()).tolist())
            if number % 20 == 10:
                fleet.publish(numbered(fleet.version + 1))
        assert checker.frames == 3000
        assert balance(fleet) == 0
    assert min(seen) >= 1
    assert len(seen) > 3


def test_served_fleet_is_seeded_again_and_resized() -> None:
    job = make_job(num_envs=2, policy="counter", collection={"totalFrames": 400}, lengths=(3, 8))
    with make_fleet(served(job, servers=2), workers=1) as fleet:
        reader = LocalFleet(fleet)
        reader.next_batch()
        assert fleet.seed(11) == ("cpu-0",)
        fleet.resize({"act": 1})
        fleet.resize(2)
        assert sorted(worker.name for worker in fleet.stats().workers) == ["act-0", "cpu-0", "cpu-1"]
        assert 20 + sum(batch.numel() for batch in reader.batches()) == 400


@pytest.mark.slow
def test_servers_can_be_scaled_while_they_serve() -> None:
    job, checker = scene("versioned", collection={"totalFrames": 6000}, step_s=0.001)
    with make_fleet(served(job), workers=3) as fleet:
        sizes = iter((3, 1))
        for number, batch in enumerate(LocalFleet(fleet).batches()):
            checker.take(batch)
            if number in (30, 120):
                fleet.resize({"act": next(sizes)}, wait=True)
                receipt = fleet.publish(numbered(fleet.version + 1), wait_s=30)
                assert len(receipt.applied) == (3 if number == 30 else 1)
        assert checker.frames == 6000
        assert fleet.stats().restarts == 0
        with pytest.raises(LastWorker, match="0 inference servers"):
            fleet.resize({"act": 0})


def test_stream_of_a_server_follows_the_job_seed() -> None:
    def drawn(seed: int) -> list[float]:
        job = make_job(num_envs=1, policy="counter", collection={"totalFrames": 40, "seed": seed})
        with make_fleet(served(job)) as fleet:
            return [number for batch in LocalFleet(fleet).batches() for number in batch["drawn"].flatten().tolist()]

    first = drawn(7)
    assert len(first) == 40
    assert drawn(7) == first
    assert not set(drawn(8)) & set(first)


def test_policy_that_cannot_act_ends_the_fleet_with_its_own_words() -> None:
    job = served(make_job(num_envs=2, policy="linear", observation="discrete"))
    with pytest.raises(WorkerFailed, match=r"worker act-0: the policy raised RuntimeError"):
        make_fleet(job, workers=1)


def test_pause_is_answered_while_the_server_is_gone() -> None:
    job, checker = scene("counter", collection={"totalFrames": 600}, step_s=0.001)
    with make_fleet(served(job), workers=1, control_timeout_s=20.0) as fleet:
        reader = LocalFleet(fleet)
        checker.take(reader.next_batch())
        pid = kill_server(fleet, sent=signal.SIGSTOP)
        time.sleep(0.7)
        fleet.pause()
        os.kill(pid, signal.SIGCONT)
        fleet.resume()
        for batch in reader.batches():
            checker.take(batch)
        assert checker.frames == 600


class NodesApart(RayEngine):
    """Workers take the way between nodes to servers that are on this machine."""

    def start(self, start: Start) -> RayConnection:
        connection = super().start(start)
        receive = connection.receive

        def from_afar(source: Any) -> list[object]:
            return [
                replace(message, address=replace(message.address, machine="another one"))
                if isinstance(message, Listening)
                else message
                for message in receive(source)
            ]

        connection.receive = from_afar  # type: ignore[method-assign]
        return connection


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sent", "kind"),
    [(None, signal.SIGKILL, "crash"), (None, signal.SIGSTOP, "hang"), (NodesApart, signal.SIGKILL, "crash")],
)
def test_lost_servers_cost_time_and_nothing_else(
    request: pytest.FixtureRequest, engine: type[RayEngine] | None, sent: signal.Signals, kind: str
) -> None:
    job, checker = scene("versioned", collection={"totalFrames": 4000}, step_s=0.001)
    if engine is None:
        opened = make_fleet(served(job), workers=2, hang_timeout_s=3.0)
    else:
        request.getfixturevalue("ray_cluster")
        opened = WorkerFleet(served(job), FleetOptions(workers=2), engine=engine(RayOptions(num_cpus=0)))
    with opened as fleet:
        assert fleet.publish(numbered(1), wait_s=60).applied == ("act-0",)
        lost = 0
        for batch in LocalFleet(fleet).batches():
            checker.take(batch)
            if lost < 2 and fleet.stats().frames > 1000 * (lost + 1):
                kill_server(fleet, sent=sent)
                lost += 1
                fleet.publish(numbered(lost + 1))
        stats = fleet.stats()
        assert stats.frames == checker.frames == 4000
        assert stats.groups["act"].restarts == {kind: 2}
        assert stats.groups["cpu"].restarts == {}
        assert balance(fleet) == 0
        assert stats.dropped.get("crash", 0) == 0
    assert checker.attempts == {(0, 0, 0), (0, 1, 0)}
