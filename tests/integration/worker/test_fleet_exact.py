"""Every value of every frame that a local fleet delivers, over workers, modes, kills, publishes, loans and draining,
and over inference servers.
"""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from cormorant_postproc import frames_of
from cormorant_testing.collecting import make_checker, make_job, scene
from cormorant_testing.fleets import balance, make_fleet, on_all_placements_slowly, reading, served
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import until
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import ControlTimeout, FleetError, LastWorker, WeightsMismatch
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.fleet.events import FleetEvent
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.sinks.dataset import existing_dataset


def kill_within_a_batch(fleet: WorkerFleet, chance: random.Random) -> bool:
    """Kill a worker that has an unfinished batch. False when it was between two batches: nothing was done."""
    workers = [worker for worker in fleet.stats().workers if worker.phase == "stepping"]
    if not workers:
        return False
    pid = chance.choice(workers).pid
    # Stopped first: whether its batch is open cannot change any more between looking and killing.
    os.kill(pid, signal.SIGSTOP)
    has_open_batch = any(worker.pid == pid and worker.frames % 20 for worker in fleet.stats().workers)
    os.kill(pid, signal.SIGKILL if has_open_batch else signal.SIGCONT)
    return has_open_batch


def test_killed_workers_lose_and_repeat_nothing_finished() -> None:
    chance = random.Random(3)
    job, checker = scene(
        "versioned", collection={"totalFrames": 6000}, step_s=0.002, run_policy={"maxRestartsPerSlot": 20}
    )
    events: list[FleetEvent] = []
    with make_fleet(job, workers=2) as fleet:
        fleet.subscribe(events.append)
        fleet.publish(numbered(1), wait_s=20)
        kills = 0
        for batch in LocalFleet(fleet).batches():
            checker.take(batch)
            if fleet.stats().frames > 700 * (kills + 1) and kills < 2 and kill_within_a_batch(fleet, chance):
                kills += 1
                # Who comes after the kill never acts with weights from before it.
                fleet.publish(numbered(kills + 1))
            assert all(stream.version >= 1 for (path, _), stream in checker.streams.items() if path[2] > 0)
        stats = fleet.stats()
        assert stats.frames == checker.frames == 6000
        assert stats.restarts == kills == 2
        assert balance(fleet) == 0
        assert stats.dropped.get("crash", 0) > 0
    assert len(checker.attempts) == 4
    lost = [event for event in events if event.kind == "worker_lost"]
    assert ["was killed by SIGKILL" in event.reason and event.frames > 0 for event in lost] == [True] * 2


@on_all_placements_slowly
def test_weights_act_whole_and_never_late(engine: str) -> None:
    actors = ("act-0",) if engine.endswith("served") else ("cpu-0", "cpu-1")
    job = make_job(num_envs=2, policy="several", action="box", lengths=(3, 8), queue={"capacityBatches": 2})
    checker = make_checker(2, action="box", lengths=(3, 8), acts_by_version=True)
    critic = {"weight": torch.zeros(1, 4), "bias": torch.zeros(1)}
    with make_fleet(job, workers=2) as fleet:
        batches = LocalFleet(fleet).batches()
        checker.take(next(batches))
        # Weights published for one model keep the other's.
        for version, weights in ((1, {"policy": numbered(1), "critic": critic}), (5, {"policy": numbered(5)})):
            receipt = fleet.publish(weights, version=version, wait_s=20)
            assert (receipt.version, receipt.applied, receipt.waiting) == (version, actors, ())
            with pytest.raises(WeightsMismatch, match="missing: policy/bias; nothing was applied"):
                fleet.publish({"policy": {"number": numbered(9)["number"]}})
            # What was queued or under way is older; 2 queued, 2 held or landing, 2 workers with 2 tickets each.
            for _ in range(8):
                checker.take(next(batches))
            for _ in range(4):
                checker.take(batch := next(batches))
                assert int(batch["collector", "policy_version"].min()) >= version


@on_all_placements_slowly
@pytest.mark.parametrize(
    ("bound", "mode", "publishes"),
    [(0, "sync", 1), *(pytest.param(1, "async", publishes, marks=pytest.mark.slow) for publishes in (1, 3))],
)
def test_the_bound_on_staleness_holds_on_every_frame(bound: int, mode: str, publishes: int) -> None:
    weights = {"maxStaleness": bound} if mode == "async" else {}  # a sync job is on-policy unless it says otherwise
    collection = {"mode": mode, "totalFrames": 600, "weights": weights}
    job, checker = scene("versioned", collection=collection, gaps=True)
    with make_fleet(job, workers=2) as fleet:
        for batch in LocalFleet(fleet).batches():
            assert fleet.version - int(frames_of(batch)["collector", "policy_version"].min()) <= bound
            checker.take(batch)
            for _ in range(publishes):  # of 3, what waits in the queue is stale, also after workers were told to finish
                fleet.publish(numbered(fleet.version + 1))
        stats = fleet.stats()
        assert (checker.frames, stats.frames, stats.restarts) == (600, 600, 0)
        # A ticket waits for the weights that were published before it. Where nobody can overtake, nothing is in vain.
        assert stats.dropped.get("stale", 0) == 0 or mode == "async"
        assert stats.dropped.get("stale", 0) > 0 or publishes == 1
        assert balance(fleet) == 0


def test_several_consumers_of_sync_rounds_have_one_each() -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", collection={"mode": "sync", "totalFrames": 400})
    with make_fleet(job, workers=2) as fleet:
        assert None not in (fleet.borrow(timeout_s=30), fleet.borrow(timeout_s=30))


@pytest.mark.parametrize(
    ("weights", "exploration", "expected"), [({}, "random", 1), ({"maxStaleness": 9}, "random", 0), ({}, "mode", 0)]
)
def test_batches_that_grow_stale_unasked_are_said_once(
    weights: dict[str, int], exploration: str, expected: int
) -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", collection={"totalFrames": 240, "weights": weights})
    policy = job.spec.policy.model_copy(update={"exploration_type": exploration})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"policy": policy})})
    with capture_logs() as logs, make_fleet(job, workers=1) as fleet:
        for version, _ in enumerate(LocalFleet(fleet).batches(), start=1):
            if version == 1:
                until(lambda: fleet.stats().queued_batches)  # the next one is older than what is published now
            fleet.publish(numbered(version * 2))
            fleet.publish(numbered(version * 2 + 1))
    said = [log for log in logs if log["event"] == "batch_is_stale"]
    assert len(said) == expected
    assert all(log["versions"] > 1 and "on_policy=True" in log["remedy"] for log in said)


@on_all_placements_slowly
def test_a_slow_consumer_drops_the_oldest_and_the_counts_add_up() -> None:
    job, checker = scene(
        "versioned", collection={"totalFrames": 1500}, queue={"capacityBatches": 2, "onFull": "drop_oldest"}, gaps=True
    )
    with make_fleet(job, workers=2) as fleet:
        for batch in LocalFleet(fleet).batches():
            checker.take(batch)
            time.sleep(0.05)
        stats = fleet.stats()
        assert stats.frames == 1500
        assert stats.dropped["drop_oldest"] > 0
        assert checker.frames + stats.dropped["drop_oldest"] == stats.stepped_frames == 1500
        slots = fleet._core.queue.blocks
        assert slots.room == slots.limit


def test_async_envs_tell_versions_and_drain_frames_ahead() -> None:
    env = {"envpool": {"taskId": "CartPole-v1", "numEnvs": 6, "batchSize": 2, "numThreads": 2}}
    job = make_job(
        env=env,
        policy="cormorant.policies:mlp",
        queue={"capacityBatches": 1},
        collection={"framesPerBatch": 60, "totalFrames": 3000},
    )
    spans = set()
    with make_fleet(job, workers=1) as fleet:
        weights = {name: torch.zeros(spec.shape) for name, spec in fleet.specs["policy"].items()}
        while (loan := fleet.borrow(timeout_s=60)) is not None:
            with loan:
                versions = frames_of(loan.tensordict())["collector", "policy_version"]
                assert (loan.min_version, loan.max_version) == (int(versions.min()), int(versions.max()))
                spans.add(loan.max_version - loan.min_version)
            fleet.publish(weights, wait_s=10)
        until(lambda: fleet.stats().dropped)  # frames ahead, counted once the worker has ended
        assert set(fleet.stats().dropped) == {"drain"}
    assert max(spans) > 0, "rows that were under way at a batch's end were acted on by its version"


@on_all_placements_slowly
def test_straggler_hands_over_and_the_total_is_exact() -> None:
    slow = {"how": "slow", "seconds": 0.02, "seeds": WorkerPlace(seed=7, index=1).env_seeds(2)}
    collection = {"mode": "sync", "framesPerBatch": 200, "totalFrames": 3000, "preemptiveThreshold": 0.5}
    job, checker = scene("counter", failures=[slow], collection=collection)
    shares: list[dict[str, int]] = []
    with make_fleet(job, workers=2) as fleet:
        while (loan := fleet.borrow(timeout_s=120)) is not None:
            with loan:
                checker.take(loan.tensordict())
                shares.append({part.worker: part.block.num_frames for part in loan.parts})
                assert loan.num_frames == sum(shares[-1].values())
                assert min(shares[-1].values()) >= 1
        stats = fleet.stats()
    assert checker.frames == stats.frames == stats.stepped_frames == 3000
    assert stats.dropped == {}
    # A vector step of the second worker takes 40 ms, a whole batch of it four seconds.
    first, second = (sum(share.get(worker, 0) for share in shares) for worker in ("cpu-0", "cpu-1"))
    assert first > second
    # Both are in every round, but for some of the last, which have a single frame.
    assert all(len(share) == 2 for share in shares[:5])
    assert any(share["cpu-1"] < 200 for share in shares[:5])


def test_loans_keep_values_use_capacity_and_return_in_any_order() -> None:
    job, checker = scene("", lengths=4, collection={"totalFrames": 400}, queue={"capacityBatches": 3})
    with make_fleet(job, workers=1) as fleet:
        loans = [fleet.borrow() for _ in range(3)]
        kept = [loan.tensordict(copy=True) for loan in loans]
        with pytest.raises(ControlTimeout, match=r"no batch came within 0\.5 s"):
            fleet.borrow(timeout_s=0.5)  # 3 out: nothing more is accepted
        assert fleet.stats().stepped_frames == 5 * 20  # and 2 with the worker
        assert [loan.parts[0].worker for loan in loans] == ["cpu-0"] * 3
        for loan, before in zip(loans, kept, strict=True):
            assert (loan.tensordict() == before).all()
            checker.take(before)
            part = loan.parts[0]
            # The block lies in the part's memory from its first byte on: another process may map it.
            assert bytes(part.memory.buffer[: part.block.observation[0].nbytes]) == part.block.observation[0].tobytes()
        loans[1].release()
        loans[1].release()
        with pytest.raises(FleetError, match="was given back"):
            loans[1].tensordict()
        with fleet.borrow(timeout_s=20) as fourth:  # one came back: one goes out
            checker.take(fourth.tensordict(copy=True))
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(Loan.release, (*loans, *loans)))
        while (loan := fleet.borrow(timeout_s=20)) is not None:
            with loan:
                checker.take(loan.tensordict())
        assert checker.frames == fleet.stats().frames == 400
        assert fleet._core.queue.blocks.room == fleet._core.queue.blocks.limit


def test_a_drained_fleet_gives_what_it_has_and_ends_its_workers() -> None:
    job, checker = scene("", lengths=4, step_s=0.002, collection={"mode": "sync"}, queue={"capacityBatches": 2})
    with reading(job, workers=2, floor_frames=1000, epoch=4) as (fleet, reader):
        checker.take(reader.next_batch())
        assert {epoch for (_, _, _, epoch), _ in checker.streams} == {4}
        fleet.pause()  # drained all the same
        fleet.drain()
        while (loan := fleet.borrow(timeout_s=60)) is not None:
            with loan:
                checker.take(loan.tensordict())
        until(lambda: not fleet.stats().workers)
        stats = fleet.stats()
        assert (fleet.is_done, fleet.found_frames, stats.paused) == (True, 1000, False)
        assert (stats.frames, stats.stepped_frames) == (1000 + checker.frames, checker.frames)
        assert (stats.dropped, stats.restarts) == ({}, 0)


def test_drained_fleet_whose_workers_stay_is_saved_while_a_batch_is_out() -> None:
    options = FleetOptions(workers=1, waits_for_places=True, control_timeout_s=10.0)
    with WorkerFleet(make_job(num_envs=2, lengths=4), options) as fleet, fleet.borrow():
        fleet.drain()
        while fleet.skip(timeout_s=60.0):  # the queue may be full by now, with another batch waiting for a place
            pass
        assert fleet.is_done
        assert fleet.state()


# -- policies that act in inference servers ----------------------------------------------------------------------


OPTIONS = {"lengths": (3, 1, 7), "ends": "alternate"}


def kill_server(fleet: WorkerFleet, *, sent: signal.Signals) -> int:
    pid = next(worker.pid for worker in fleet.stats().workers if worker.name == "act-0")
    os.kill(pid, sent)
    return pid


@pytest.mark.parametrize(("workers", "total", "servers"), [(1, 107, 1), (2, 400, 2)])
def test_served_fleet_delivers_every_frame_exactly(workers: int, total: int, servers: int) -> None:
    job, checker = scene("counter", collection={"totalFrames": total, "initRandomFrames": 8}, **OPTIONS)
    random_frames = 0
    with make_fleet(served(job, servers=servers), workers=workers) as fleet:
        for batch in LocalFleet(fleet).batches():
            checker.take(batch)
            random_frames += int((frames_of(batch)["collector", "policy_version"] == -1).sum())
        assert (checker.frames, fleet.stats().frames, random_frames) == (total, total, 8)
        assert fleet.is_done
        # Every frame that is not a random one was a row at a server; at two, where a worker moved to the later one.
        until(lambda: not fleet.stats().workers)
        rows = sum(served["rows"] for served in fleet.stats().inference.values())
        assert rows == total - random_frames or (servers > 1 and rows > total - random_frames)
        assert balance(fleet) == 0
    assert checker.attempts == {(0, index, 0) for index in range(workers)}


def test_weights_go_to_servers_alone_while_they_are_scaled() -> None:
    job, checker = scene("versioned", collection={"totalFrames": 3000}, step_s=0.0005)
    seen: set[int] = set()
    with make_fleet(served(job), workers=1, starts_paused=True) as fleet:
        assert sorted(fleet.specs["policy"]) == ["bias", "number"]
        assert fleet.seed(7) == ("cpu-0",)  # again
        fleet.resize(2)
        assert sorted(worker.name for worker in fleet.stats().workers) == ["act-0", "cpu-0", "cpu-1"]
        assert fleet.publish(numbered(1), wait_s=30).applied == ("act-0",)
        with pytest.raises(FleetError, match="no policy acts in worker cpu-0"):
            fleet.publish(numbered(1), workers=["cpu-0"])
        fleet.resume()
        for number, batch in enumerate(LocalFleet(fleet).batches()):
            checker.take(batch)
            seen |= set(batch["collector", "policy_version"].unique().tolist())
            if servers := {15: 3, 60: 1}.get(number):
                fleet.resize({"act": servers}, wait=True)
                receipt = fleet.publish(numbered(fleet.version + 1), wait_s=30)
                assert (receipt.applied, receipt.waiting) == (("act-0", "act-1", "act-2")[:servers], ())
            elif number % 20 == 10:
                fleet.publish(numbered(fleet.version + 1))
        assert (checker.frames, balance(fleet), fleet.stats().restarts) == (3000, 0, 0)
        with pytest.raises(LastWorker, match="0 inference servers"):
            fleet.resize({"act": 0})
    assert min(seen) >= 1
    assert len(seen) > 3


def test_stream_of_a_server_follows_the_job_seed() -> None:
    def drawn(seed: int) -> list[float]:
        job = make_job(num_envs=1, policy="counter", collection={"totalFrames": 40, "seed": seed})
        with make_fleet(served(job)) as fleet:
            return [number for batch in LocalFleet(fleet).batches() for number in batch["drawn"].flatten().tolist()]

    first = drawn(7)
    assert len(first) == 40
    assert drawn(7) == first
    assert not set(drawn(8)) & set(first)


def test_pause_is_answered_while_the_server_is_gone() -> None:
    job, checker = scene("counter", collection={"totalFrames": 600}, step_s=0.001)
    with reading(served(job), workers=1, control_timeout_s=20.0) as (fleet, reader):
        checker.take(reader.next_batch())
        pid = kill_server(fleet, sent=signal.SIGSTOP)
        time.sleep(0.7)
        fleet.pause()
        os.kill(pid, signal.SIGCONT)
        fleet.resume()
        for batch in reader.batches():
            checker.take(batch)
        assert checker.frames == 600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sent", "kind"),
    [
        ("local-served", signal.SIGKILL, "crash"),
        ("local-served", signal.SIGSTOP, "hang"),
        ("ray-served", signal.SIGKILL, "crash"),
    ],
    indirect=["engine"],
)
def test_lost_servers_cost_time_and_nothing_else(tmp_path: Path, sent: signal.Signals, kind: str) -> None:
    kept: dict[str, Any] = {"queue": {}, "dataset": str(tmp_path)}
    job, checker = scene("versioned", collection={"totalFrames": 4000}, step_s=0.001, **kept)
    with make_fleet(job, workers=2, hang_timeout_s=3.0 if kind == "hang" else 120.0) as fleet:
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
    assert existing_dataset(str(tmp_path)).part_names() == ("cpu-0-0", "cpu-1-0")
