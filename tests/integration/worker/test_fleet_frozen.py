"""Workers that are stopped where they stand: the fleet goes on, answers, and ends them."""

import os
import signal
import threading
import time

from cormorant_testing.collecting import make_job
from cormorant_testing.fleets import collecting, make_fleet, on_all_placements_slowly, on_both_engines_slowly, reading
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import until
from cormorant_worker.fleet.fleet import WorkerFleet


def stop(fleet: WorkerFleet, number: int = 0) -> int:
    """Freeze a worker's process. Returns its id."""
    pid = collecting(fleet)[number].pid
    os.kill(pid, signal.SIGSTOP)
    return pid


def is_replaced(fleet: WorkerFleet, number: int = 0) -> bool:
    workers = collecting(fleet)
    return len(workers) > number and workers[number].attempt == 1


@on_both_engines_slowly
def test_frozen_worker_and_publishes_hold_nobody_up(engine: str) -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=5, step_s=0.001)
    with reading(job, workers=2, hang_timeout_s=3600.0) as (fleet, reader):
        frozen = stop(fleet)
        try:
            for version in range(1, 301):  # one that is held up never returns: the worker is woken at the end
                receipt = fleet.publish(numbered(version % 100))  # actions beyond 100 are refused
                fleet.stats()
            assert "cpu-0" in receipt.waiting
            # The other one works on, and takes the newest.
            until(lambda: "cpu-1" in fleet.receipt(300).applied)
            assert reader.next_batch(timeout=30) is not None
        finally:
            os.kill(frozen, signal.SIGCONT)
        # It was told of few of them: the newest wins.
        until(lambda: fleet.receipt(300).waiting == ())
        handle = fleet._core.slots["cpu", 0].worker
        if handle is not None:  # it may have been replaced on a busy machine
            assert len(handle.unanswered) <= 1


@on_all_placements_slowly
def test_frozen_waiting_worker_of_a_sync_fleet_is_replaced(engine: str) -> None:
    # Frozen while it waits for a ticket, it gets one: the round would wait for ever.
    job = make_job(
        num_envs=2, lengths=5, collection={"mode": "sync", "framesPerBatch": 40}, queue={"capacityBatches": 1}
    )
    with reading(job, workers=2, hang_timeout_s=3.0) as (fleet, reader):
        until(lambda: [worker.phase for worker in collecting(fleet)] == ["waiting", "waiting"])
        assert reader.next_batch(timeout=30) is not None
        until(lambda: [worker.phase for worker in collecting(fleet)] == ["waiting", "waiting"])
        stop(fleet)
        for _ in range(6):
            assert reader.next_batch(timeout=60) is not None
        assert is_replaced(fleet)


def test_frozen_worker_of_a_paused_fleet_is_replaced() -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=5, step_s=0.001)
    with make_fleet(job, workers=1, hang_timeout_s=1.0) as fleet:
        fleet.pause()
        time.sleep(1.5)
        assert not is_replaced(fleet)  # it was told to pause
        stop(fleet)
        fleet.publish(numbered(1))
        until(lambda: is_replaced(fleet))


def test_silence_of_the_fleet_itself_is_no_workers_fault() -> None:
    job = make_job(num_envs=2, lengths=5, step_s=0.001)
    with make_fleet(job, workers=1, hang_timeout_s=2.0) as fleet:
        with fleet._changed:
            time.sleep(3.0)  # as if this process had been stopped
            fleet._core.slots["cpu", 0].worker.last_progress -= 0.5
            assert fleet.silent_s > 2.0
        time.sleep(0.3)
        assert not is_replaced(fleet)


def test_worker_that_ends_without_being_told_holds_up_no_caller() -> None:
    job = make_job(num_envs=2, lengths=5, step_s=0.001)
    with reading(job, workers=2) as (fleet, reader):
        handle = fleet._core.slots["cpu", 0].worker
        is_waiting, may_end = threading.Event(), threading.Event()
        end = handle.connection.describe_end

        def describe_end() -> str:
            is_waiting.set()
            may_end.wait(30)
            return end()

        handle.connection.describe_end = describe_end
        os.kill(handle.connection.pid, signal.SIGKILL)
        assert is_waiting.wait(30)
        try:
            # Seeing it off takes its time; nobody waits for that.
            assert [worker.name for worker in fleet.stats().workers] == ["cpu-1"]
            assert reader.next_batch(timeout=30) is not None
        finally:
            may_end.set()
        until(lambda: is_replaced(fleet))
