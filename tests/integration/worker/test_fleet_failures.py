"""Workers that are stopped where they stand, and environments that fail: what ends a fleet, what is tried again."""

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from cormorant_testing.collecting import make_job
from cormorant_testing.fleets import collecting, make_fleet, on_all_placements_slowly, on_both_engines_slowly, reading
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import until
from cormorant_testing.vectors import COUNTING
from cormorant_worker.errors import EnvCrashed, InvalidAction, WorkerFailed
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.stats import EnvFailures
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.worker.runtime import describe_failure

SEGFAULT = {"entrypoint": "ctypes:string_at", "kwargs": {"ptr": 0}, "vectorization": "inline", "numEnvs": 2}
NAN = r"worker cpu-0: the policy's action for environment 0 is \[nan, nan\] .* NaN: look for NaN"
SERVED = [{"name": "cpu"}, {"name": "act", "role": "inference", "replicas": 1}]


def stop(fleet: WorkerFleet) -> int:
    """Freeze the first worker's process. Returns its id."""
    pid = collecting(fleet)[0].pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)  # on a busy machine it may answer once more
    return pid


def is_replaced(fleet: WorkerFleet) -> bool:
    return [worker.attempt for worker in collecting(fleet)][:1] == [1]


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
        # Not the first one, if a busy machine gave that no processor for a second.
        until(lambda: [worker.phase for worker in collecting(fleet)] == ["paused"])
        (paused,) = collecting(fleet)
        stop(fleet)
        fleet.publish(numbered(1))
        until(lambda: [worker.attempt for worker in collecting(fleet)] == [paused.attempt + 1])


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


@pytest.mark.parametrize(
    ("job", "words", "note"),
    [
        ({"env": {"gymnasium": SEGFAULT}}, "was killed by SIGSEGV while building", ""),
        ({"failures": [{"step": 1, "words": "no display"}]}, "raised ValueError: no display.*without .* a step", ""),
        ({"policy": "raising"}, "raised RuntimeError: no weights for this planet", "in raising"),
        ({"policy": "nan_at", "policy_kwargs": {"step": 3}, "action": "box"}, NAN, "InvalidAction"),
        ({"policy": "plain", "observation": "discrete", "worker_groups": SERVED}, "worker act-0: .* IndexError on", ""),
    ],
)
def test_what_no_worker_can_do_ends_the_fleet_at_once(job: dict, words: str, note: str) -> None:
    with pytest.raises(WorkerFailed, match=words) as caught, make_fleet(make_job(**job), workers=1) as fleet:
        list(LocalFleet(fleet).batches())
    assert note in "".join(getattr(caught.value, "__notes__", []))
    assert "\n" not in str(caught.value)
    assert "restarts in a row" not in str(caught.value), "ten more workers would have failed in the same way"


@pytest.mark.parametrize(
    ("error", "acts_as_published", "is_final"),
    [
        (EnvCrashed("environment 0 raised", has_stepped=True), False, False),
        (EnvCrashed("environment 0 raised", has_stepped=False), False, True),
        (InvalidAction("NaN"), False, True),
        (InvalidAction("NaN"), True, False),  # the next weights may act better
        (RuntimeError("of the policy"), False, False),
    ],
)
def test_failure_that_another_worker_may_not_have_is_not_final(
    error: Exception, acts_as_published: bool, is_final: bool
) -> None:
    failed = describe_failure(error, acts_as_published=acts_as_published)
    assert (failed.is_final, failed.may_pass) == (is_final, isinstance(error, EnvCrashed))


def test_a_worker_that_fails_loses_one_batch(tmp_path: Path) -> None:
    """Its shard is an hour from being sealed when its environment fails in step 50 and in every first step after it;
    the second worker's never makes a step, and ends no fleet that has collected frames.
    """
    failures = [
        {"step": 50, "flag": str(tmp_path / "first")},
        {"step": 1, "flag": str(tmp_path / "rest"), "skip": 1, "times": 7},
    ]
    collection = {"framesPerBatch": 10, "totalFrames": 100}
    job = make_job(num_envs=1, failures=failures, lengths=10, collection=collection, dataset=str(tmp_path / "frames"))
    with make_fleet(job, workers=1, seal_after_s=3600.0) as fleet:
        assert fleet.wait_until_done(60)
        stats = fleet.stats()
    assert (stats.frames, stats.restarts, dict(stats.dropped)) == (100, 2, {"crash": 9})


def test_a_replaced_worker_inherits_the_restarts() -> None:
    """Each life of the environment has two steps and raises in the third."""
    env = {"entrypoint": COUNTING, "vectorization": "inline", "maxRestarts": 4}
    env["kwargs"] = {"failures": [{"step": 3, "words": "no display"}], "lengths": 1000}
    job = make_job(env={"gymnasium": env}, run_policy={"maxRestartsPerSlot": 1}, collection={"framesPerBatch": 1000})
    with reading(job, workers=1) as (fleet, reader):
        with pytest.raises(WorkerFailed, match=r"no display.*4 restarts within 10 minutes.*in a row is 1 "):
            reader.next_batch(timeout=60)
        stats = fleet.stats()
    assert stats.stepped_frames == 5 * 2 + 2, "five lives in the first worker, one in the second"


def test_a_rare_failure_is_no_trouble() -> None:
    now = [0.0]
    failures = EnvFailures(clock=lambda: now[0])  # ten within ten minutes
    for _ in range(9):
        failures.note(("cpu", 0), "cpu-0", {"env": 1, "reason": "raised ValueError: no", "exception": "Traceback"})
        failures.note(("cpu", 1), "cpu-1", {"env": 1, "reason": "raised ValueError: no"})
    assert (failures.sentence(dropped=5), failures.recent(("cpu", 0)), failures.recent(("cpu", 2))) == ("", 9, 0)
    now[0] = 46.0
    failures.note(("cpu", 0), "cpu-0", {"env": 1, "reason": "raised KeyError: 3"})
    assert failures.sentence(dropped=161_099) == (
        "environments keep failing: 19 restarts in 46 s, 161,099 frames dropped; the first: environment 1 of worker "
        "cpu-0 raised ValueError: no\nTraceback"
    )
    now[0] = 600.0
    assert (failures.sentence(dropped=5), failures.recent(("cpu", 0))) == ("", 1)
