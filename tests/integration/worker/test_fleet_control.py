"""Pause, state, sizes by group, failures and the end of a local fleet, with real processes."""

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
import torch
from tensordict import TensorDict

from cormorant_contract.errors import BatchTimeout
from cormorant_testing.collecting import assert_same, make_job, scene
from cormorant_testing.fleets import collecting, make_fleet, on_all_placements_slowly, on_both_engines_slowly, reading
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import until
from cormorant_worker.errors import ControlTimeout, FleetClosed, FleetError, StateError
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.local.engine import LocalEngine
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.turn import life
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.wire import SharedMemory


def test_no_memory_is_asked_for_with_the_fleets_condition_held(monkeypatch: pytest.MonkeyPatch) -> None:
    job, state = make_job(num_envs=2, policy="versioned", action="box", lengths=5), b""

    def noted(call: Any) -> Any:
        def noting(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                held.append(fleet._changed._is_owned())
            return call(*args)

        return noting

    for _ in range(2):
        with make_fleet(job, workers=2) as fleet, monkeypatch.context() as patch:
            held = list[bool]()
            patch.setattr(fleet._engine, "share", noted(fleet._engine.share))
            patch.setattr(SharedMemory, "create", noted(SharedMemory.create))
            if not state:
                fleet.publish(numbered(1), wait_s=60)
                state = fleet.state()
            fleet.restore(state)
            assert held
            assert not any(held)


def test_lines_of_workers_harm_neither_them_nor_the_fleet() -> None:
    env = {"entrypoint": "cormorant_testing.envs:LogsAnything", "vectorization": "inline", "numEnvs": 2}
    unread, writer = os.pipe()
    os.close(unread)
    with os.fdopen(writer, "w") as closed, reading(make_job(env={"gymnasium": env}), workers=1) as (_, reader):
        with structlog.testing.capture_logs() as lines:
            until(lambda: reader.next_batch() is not None and {"said", "exploded"} <= {line["event"] for line in lines})
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(closed))
        try:
            for _ in range(3):
                reader.next_batch()
        finally:
            structlog.reset_defaults()
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # so that what the file still holds can be written
    said, exploded = (next(line for line in lines if line["event"] == event) for event in ("said", "exploded"))
    assert (said["worker"], said["env_worker"], said["event_kind"]) == ("cpu-0", "mine", "step")
    assert said["lock"].startswith("<unlocked _thread.lock")
    assert (exploded["env_level"], exploded["log_level"]) == (3, "info")


def ids_of(batches: list[TensorDict]) -> set[int]:
    return {number for batch in batches for number in batch["collector", "traj_ids"].unique().tolist()}


def steady(fleet: WorkerFleet, seconds: float = 0.4) -> bool:
    before = fleet.stats().stepped_frames
    time.sleep(seconds)
    return fleet.stats().stepped_frames == before


@on_all_placements_slowly
def test_pause_stops_steps_keeps_batches_outlives_deaths() -> None:
    # Neither the job nor the room in its queue ends, however long the pauses take.
    job, checker = scene("counter", step_s=0.002, collection={"framesPerBatch": 200}, queue={"capacityBatches": 200})
    with make_fleet(job, workers=2) as fleet:
        for _ in range(8):  # in the middle of batches, again and again
            fleet.pause()
            assert steady(fleet, 0.02)
            fleet.resume()
        until(lambda: not steady(fleet, 0.05))
        fleet.pause()
        fleet.pause()
        assert fleet.stats().paused
        assert {worker.phase for worker in collecting(fleet)} == {"paused"}
        assert steady(fleet)
        under_way = fleet.stats().stepped_frames
        assert under_way % 200, "the pause came at a batch boundary: nothing was kept in the middle"
        fleet.resume()

        # One dies at the very moment of a pause: nobody waits for it, and its replacement does not step.
        os.kill(collecting(fleet)[0].pid, signal.SIGKILL)
        fleet.pause()
        until(lambda: [w.attempt for w in collecting(fleet)] == [1, 0] and fleet._core.slots.is_complete)
        assert steady(fleet)
        fleet.resume()
        for batch in islice(LocalFleet(fleet).batches(), 10):
            checker.take(batch)
        assert checker.frames == 10 * 200


@on_both_engines_slowly
def test_a_state_goes_on_bit_by_bit_in_another_fleet() -> None:
    options = {"lengths": (3, 8), "ends": "alternate"}
    job = make_job(num_envs=2, policy="counter", collection={"totalFrames": 400}, **options)
    with make_fleet(job, workers=1) as fleet:
        expected = list(LocalFleet(fleet).batches(copy=True))
    with reading(job, workers=1) as (fleet, reader):
        found: list[TensorDict] = [reader.next_batch(copy=True) for _ in range(3)]
        fleet.publish({"weight": torch.ones(1)}, version=4)
        fleet.publish({"weight": torch.zeros(1)}, workers=["cpu-0"])  # not part of the state
        fleet.pause()
        saved = fleet.state()
        assert fleet.stats().paused
        assert steady(fleet, 0.1)
        # What was collected and not taken is counted in the state: it is still to be had here.
        with pytest.raises(BatchTimeout, match=r"no batch came within 1.0 s; cpu-0 is"):
            found += iter(lambda: reader.next_batch(1.0, copy=True), None)
    with reading(job, workers=1) as (fleet, reader):
        reader.next_batch()  # what it collected on its own is forgotten
        fleet.restore(saved)
        assert fleet.stats().version == 4
        assert fleet.stats().frames == sum(batch.numel() for batch in found)
        rest = list(reader.batches(copy=True))
        assert fleet.stats().frames == 400
    # The first fleet may have gone on after it was saved: not one of its ids comes again.
    assert not ids_of(found) & ids_of(rest)
    assert_same(found + rest, expected, but=[("collector", "policy_version"), ("collector", "traj_ids")])


def test_operations_between_batches_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_fleet(make_job(num_envs=2, lengths=5), workers=2) as fleet, ThreadPoolExecutor(4) as threads:
        save, acting, most = fleet._quiesce.save, list[int](), list[int]()

        def noted() -> FleetState:
            acting.append(0)
            most.append(len(acting))
            found = save()
            acting.pop()
            return found

        monkeypatch.setattr(fleet._quiesce, "save", noted)
        fleet.pause()
        assert len(set(threads.map(lambda _: fleet.state(), range(8)))) == 1
        assert max(most) == 1, "a count of one restore would meet the environments of another"
        assert fleet.stats().paused
        monkeypatch.setattr(fleet._core, "options", replace(fleet._core.options, control_timeout_s=0.0))
        refusal = pytest.raises(ControlTimeout, match="another state, restore, seed or call did not end within")
        with fleet._changed, fleet._quiesce.between_batches(), refusal:
            fleet.state()


@pytest.mark.slow
@pytest.mark.parametrize("has_dataset", [False, True])
def test_a_fleet_that_has_collected_everything_has_a_state(tmp_path: Path, has_dataset: bool) -> None:
    options = {"dataset": str(tmp_path), "queue": {}} if has_dataset else {}
    job = make_job(num_envs=2, policy="counter", lengths=(3, 8), collection={"totalFrames": 200}, **options)
    with make_fleet(job, workers=2) as fleet:
        fleet.publish({"weight": torch.ones(1)}, version=4)
        first = list(LocalFleet(fleet).batches(copy=True))
        saved = fleet.state()
        assert saved == fleet.state()
    more = make_job(num_envs=2, policy="counter", lengths=(3, 8), collection={"totalFrames": 300}, **options)
    with make_fleet(more, workers=2, starts_paused=True) as fleet:
        fleet.restore(saved)
        assert (fleet.stats().version, fleet.stats().frames) == (4, 200)
        fleet.resume()
        rest = list(LocalFleet(fleet).batches(copy=True))
    assert sum(batch.numel() for batch in rest) == 100
    assert not ids_of(first) & ids_of(rest) or has_dataset


def test_environments_that_cannot_be_saved_are_named() -> None:
    env = {"id": "CartPole-v1", "vectorization": "inline", "numEnvs": 2}
    with structlog.testing.capture_logs() as logs, make_fleet(make_job(env={"gymnasium": env}), workers=1) as fleet:
        saved = FleetState.from_bytes(fleet.state())
    assert saved.not_saved == {"CartPoleEnv has no get_state and set_state": ["cpu-0"]}
    (line,) = [line for line in logs if line["event"] == "environments_not_saved"]
    assert line["workers"] == ["cpu-0"]
    assert line["reason"] == "CartPoleEnv has no get_state and set_state; they begin new episodes"


@on_all_placements_slowly
def test_unrestorable_environment_is_named_and_the_fleet_lives() -> None:
    with reading(make_job(failures=[{"at": "restore"}]), workers=1) as (fleet, reader):
        saved = fleet.state()
        with pytest.raises(
            StateError,
            match="could not restore its state: cpu-0: environment 0 could not take its state: ValueError: told",
        ):
            fleet.restore(saved)
        others = replace(FleetState.from_bytes(saved), workers={"cpu-7": b"zero"}, attempts={"cpu-7": 0}).to_bytes()
        with pytest.raises(StateError, match=r"the state holds workers \['cpu-7'\]"):
            fleet.restore(others)
        fleet.pause()
        fleet.resume()
        assert reader.next_batch() is not None


@pytest.mark.slow
def test_a_worker_that_was_healthy_fails_for_the_first_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "_HEALTHY_S", 0.0)
    job = make_job(num_envs=2, lengths=5, step_s=0.001, run_policy={"maxRestartsPerSlot": 1})
    with make_fleet(job, workers=1) as fleet:
        for attempt in range(3):
            until(lambda attempt=attempt: [w.attempt for w in fleet.stats().workers] == [attempt])
            while fleet.stats().workers[0].frames < 60:  # batches have 20
                fleet.skip(timeout_s=20)
            os.kill(fleet.stats().workers[0].pid, signal.SIGKILL)
        until(lambda: [w.attempt for w in fleet.stats().workers] == [3])
        assert fleet.stats().restarts == 3


def test_closing_twice_and_under_a_waiting_consumer() -> None:
    job = make_job(num_envs=2, lengths=5, step_s=0.01, collection={"framesPerBatch": 2000})
    fleet = make_fleet(job, workers=1)
    pids = [worker.pid for worker in fleet.stats().workers]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet.borrow)
        until(lambda: not steady(fleet, 0.05))
        fleet.close()
        fleet.close()
        with pytest.raises(FleetClosed):
            waiting.result(timeout=5)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(FleetClosed):
        fleet.borrow()


@pytest.mark.slow
def test_a_fleet_leaves_no_descriptor_behind() -> None:
    job = make_job(num_envs=2, lengths=5)
    us = psutil.Process()

    def run(workers: int) -> int:
        with make_fleet(job, workers=workers) as fleet:
            LocalFleet(fleet).next_batch()
        del fleet
        gc.collect()
        return us.num_fds()

    assert run(1) == run(2)


def test_workers_of_all_groups_are_spread_over_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(LocalEngine):
        def device_of(self, device: str, number: int) -> str:
            asked.append((device, number))
            return super().device_of(device, number)

    asked = list[tuple[str, int]]()
    groups = [{"name": "a"}, {"name": "b", "replicas": 1}]
    job = make_job(num_envs=1, lengths=5, workers=2, worker_groups=groups)
    with WorkerFleet(job, FleetOptions(workers=3), engine=Asked()) as fleet:
        assert sorted(asked) == [("cpu", 0), ("cpu", 1), ("cpu", 2)]
        assert [worker.name for worker in fleet.stats().workers if worker.device == "cpu"] == ["a-0", "a-1", "b-0"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    places = [("cuda", 0), ("cuda", 1), ("cuda", 2), ("cuda:0", 1), ("cpu", 1)]
    assert [LocalEngine().device_of(*place) for place in places] == ["cuda:0", "cuda:1", "cuda:0", "cuda:0", "cpu"]


@on_both_engines_slowly
@pytest.mark.slow
def test_worker_of_a_given_up_slot_finishes_first() -> None:
    job, checker = scene("counter", step_s=0.002, collection={"mode": "sync"})
    with reading(job, workers=3) as (fleet, reader):

        def names() -> list[tuple[str, int]]:
            return [(worker.name, worker.attempt) for worker in fleet.stats().workers]

        def take() -> int:
            batch = reader.next_batch(timeout=60)
            assert batch is not None
            checker.take(batch)
            return batch.shape[0]

        take()
        with pytest.raises(FleetError, match="there is no worker cpu-7; there are cpu-0, cpu-1, cpu-2"):
            fleet.publish({"weight": torch.zeros(1)}, workers=["cpu-7"])
        fleet.resize({"cpu": (0, 2)}, wait=False)
        while len(names()) == 3:
            take()
        assert names() == [("cpu-0", 0), ("cpu-2", 0)]
        fleet.resize({"cpu": 2})  # what an operator says again and again: nothing is to be done
        while take() != 4:
            pass
        assert names() == [("cpu-0", 0), ("cpu-2", 0)]
        fleet.resize({"cpu": 3}, wait=False)
        while take() != 6:
            pass
        assert names() == [("cpu-0", 0), ("cpu-1", 1), ("cpu-2", 0)]
        stats = fleet.stats()
        assert stats.dropped == {}
        assert stats.restarts == 0
