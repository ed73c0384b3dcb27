"""A fleet that is given another seed: the same frames as any other fleet with that seed, and nothing of before.
Publishing in the middle of collecting: when weights act, who gets them, who refuses them.
"""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
import structlog
import torch
from tensordict import TensorDict

from cormorant_testing.collecting import assert_same, make_job
from cormorant_testing.envs import IDENT_MODULUS
from cormorant_testing.fleets import collecting, make_fleet, on_all_placements_slowly, on_both_engines_slowly, reading
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import Repeated, until
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.trajectories import trajectory_base
from cormorant_worker.errors import FleetError, WeightsError
from cormorant_worker.fleet.events import FleetEvent
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.weights.blob import WeightsBlob, to_bytes
from cormorant_worker.weights.staged import PolicyVersion

PONG = {"envpool": {"taskId": "Pong-v5", "numEnvs": 4, "numThreads": 1}, "maxEpisodeSteps": 40}
ASYNC_CARTPOLE = {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4, "batchSize": 2, "numThreads": 1}}


def paused(**job: Any) -> WorkerFleet:
    """A fleet that has not collected anything yet."""
    return make_fleet(make_job(**job), workers=2, starts_paused=True)


def collect(fleet: WorkerFleet, batches: int) -> list[TensorDict]:
    fleet.resume()
    reader = LocalFleet(fleet)
    return [reader.next_batch(60, copy=True) for _ in range(batches)]


def idents(batch: TensorDict) -> set[int]:
    """Which environments of `CountingEnv` collected it."""
    return set(batch["observation"][..., 0].long().unique().tolist())


def idents_of(path: WorkerPlace) -> set[int]:
    return {seed % IDENT_MODULUS for seed in path.env_seeds(2)}


# Not behind a server, where a policy draws for whatever rows have come.
@on_both_engines_slowly
@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"policy": "counter", "lengths": (3, 8)}, id="recurrent-policy"),
        pytest.param({"env": PONG}, id="pong"),
    ],
)
@pytest.mark.slow
def test_fleets_with_the_same_seed_collect_the_same_frames(job: Mapping[str, Any]) -> None:
    found = []
    for first in (1, 2):
        with paused(**job, collection={"mode": "sync", "seed": first}) as fleet:
            assert fleet.seed(9) == ("cpu-0", "cpu-1")
            assert fleet.stats().paused
            found.append(collect(fleet, 3))
    assert_same(*found)
    # A fleet that was made with the seed collects them, too; its trajectories are others.
    with paused(**job, collection={"mode": "sync", "seed": 9}) as fleet:
        assert_same(found[0], collect(fleet, 3), but=[("collector", "traj_ids")])


@on_all_placements_slowly
def test_reseeding_keeps_weights_counts_and_unique_ids() -> None:
    job = make_job(
        num_envs=2,
        policy="versioned",
        action="box",
        lengths=(30, 80),
        collection={"mode": "sync", "totalFrames": 800},
        queue={"capacityBatches": 1},
    )
    with reading(job, workers=2) as (fleet, reader):
        fleet.publish(numbered(3), version=3, wait_s=20)
        before = [reader.next_batch(copy=True) for _ in range(4)]
        collected = fleet.stats().frames
        assert fleet.seed(9) == ("cpu-0", "cpu-1")
        stats = fleet.stats()
        assert stats.frames >= collected
        assert (stats.version, stats.dropped, stats.restarts) == (3, {}, 0)
        assert {worker.version for worker in stats.workers} == {3}
        rest = [batch.clone() for batch in reader.batches(copy=True)]
        assert fleet.stats().frames == 800 == sum(batch.numel() for batch in before + rest)
    new = idents_of(WorkerPlace(seed=9, index=0)) | idents_of(WorkerPlace(seed=9, index=1))
    old = idents_of(WorkerPlace(seed=7, index=0)) | idents_of(WorkerPlace(seed=7, index=1))
    seeded = [i for i, batch in enumerate(rest) if idents(batch) == new]
    assert seeded == list(range(seeded[0], len(rest)))
    assert all(idents(batch) == old for batch in before + rest[: seeded[0]])
    used = [set(batch["collector", "traj_ids"].unique().tolist()) for batch in before + rest]
    first = len(before) + seeded[0]
    assert not set().union(*used[:first]) & set().union(*used[first:])
    # They begin where environments begin, not in the middle, and no step is missing from then on.
    began = rest[seeded[0]]
    assert began["observation"][:, 0, 1:].abs().sum() == 0
    assert set(began["collector", "traj_ids"][:, 0].tolist()) <= {
        trajectory_base(WorkerPlace(seed=9, index=index)) + n for index in (0, 1) for n in range(2, 40)
    }
    assert began["observation"][:, :10, 2].tolist() == [list(range(10))] * 4


@on_both_engines_slowly
@pytest.mark.parametrize("warmup", [0, 30])
def test_a_seed_before_the_first_batch_rules_it(warmup: int) -> None:
    job = make_job(
        num_envs=2, policy="versioned", action="box", lengths=(30, 80), queue={"capacityBatches": 2},
        collection={"initRandomFrames": warmup, "totalFrames": 200},
    )  # fmt: skip
    with make_fleet(job, workers=1) as fleet:
        until(lambda: fleet._core.queue.num_waiting >= 2)
        fleet.seed(9)
        batches = list(LocalFleet(fleet).batches(copy=True))
        with pytest.raises(FleetError, match="has collected all its frames"):
            fleet.seed(1)
        dropped = fleet.stats().dropped["seed"]
    assert idents(batches[0]) == idents_of(WorkerPlace(seed=9, index=0))
    versions = torch.cat([batch["collector", "policy_version"].reshape(-1) for batch in batches])
    assert (len(versions), int((versions < 0).sum())) == (200, warmup)
    assert dropped >= 40


@on_all_placements_slowly
@pytest.mark.slow
def test_replacements_begin_with_the_new_seed() -> None:
    with paused(num_envs=2, collection={"mode": "sync"}, lengths=(3, 8)) as fleet:
        fleet.seed(9)
        state = fleet.state()
        os.kill(collecting(fleet)[1].pid, signal.SIGKILL)
        batch = collect(fleet, 1)[0]
        assert idents(batch[2:]) == idents_of(WorkerPlace(seed=9, index=1, attempt=1))
    # The seed is part of the state: those of a fleet that goes on from it begin with it, too.
    with paused(num_envs=2, collection={"mode": "sync", "seed": 1}, lengths=(3, 8)) as fleet:
        fleet.restore(state)
        os.kill(collecting(fleet)[1].pid, signal.SIGKILL)
        batch = collect(fleet, 1)[0]
        assert idents(batch[:2]) == idents_of(WorkerPlace(seed=9, index=0))
        assert idents(batch[2:]) == idents_of(WorkerPlace(seed=9, index=1, attempt=2, epoch=1))


@pytest.mark.slow
def test_frames_ahead_in_async_envs_count_as_dropped() -> None:
    job = make_job(env=ASYNC_CARTPOLE, collection={"totalFrames": 2000})
    with reading(job, workers=2) as (fleet, reader):
        delivered = sum(reader.next_batch().numel() for _ in range(20))
        fleet.seed(9)
        fleet.seed(10)
        at_seed = fleet.stats()
        # What is neither counted nor dropped are whole batches that the queue has no room for yet.
        waiting = at_seed.stepped_frames - at_seed.frames - at_seed.dropped["seed"]
        assert waiting % 20 == 0
        assert 0 <= waiting <= 80
        delivered += sum(batch.numel() for batch in reader.batches())
        assert delivered == fleet.stats().frames == 2000


# -- publishing in the middle of collecting ----------------------------------------------------------------------


CLOCK = {"entrypoint": "cormorant_testing.envs:Clock", "vectorization": "inline", "numEnvs": 2}


def test_no_frame_has_older_weights_after_applied() -> None:
    job = make_job(
        env={"gymnasium": {**CLOCK, "kwargs": {"step_s": 0.001}}}, policy="versioned", collection={"framesPerBatch": 60}
    )
    applied: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def note(event: FleetEvent) -> None:
        if event.kind == "applied":
            applied[event.worker].append((time.monotonic(), event.version))

    with make_fleet(job, workers=2) as fleet:
        fleet.subscribe(note)
        frames: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
        for version in range(3, 120, 3):
            fleet.publish(numbered(version - 2))
            blob = WeightsBlob.from_bytes(to_bytes({"policy": numbered(version - 1)}))  # as the head makes one
            fleet.publish(blob, version=version - 1)
            fleet.publish(numbered(version))
            loan = fleet.borrow(timeout_s=60)
            assert loan is not None
            with loan:
                for part in loan.parts:
                    rows = part.block.num_rows
                    acted_after = part.block.observation[0][:rows].max(axis=(1, 2))
                    numbers = part.block.action[0][:rows, :, 0]
                    stamps = part.block.policy_version[:rows]
                    assert (numbers == stamps).all()
                    frames[part.worker] += zip(
                        acted_after.tolist(), numbers.min(axis=1).tolist(), stamps.min(axis=1).tolist(), strict=True
                    )
        receipt = fleet.publish(numbered(version + 1), wait_s=30)
        assert (receipt.applied, receipt.waiting, receipt.refused) == (("cpu-0", "cpu-1"), (), {})
    checked = 0
    for worker, moments in applied.items():
        versions = [number for _, number in moments]
        assert versions == sorted(set(versions))
        acted = [number for _, number, _ in frames[worker]]
        assert acted == sorted(acted)
        for heard, number in moments:
            after = [acts for at, acts, _ in frames[worker] if at > heard]
            assert all(acts >= number for acts in after)
            checked += len(after)
    assert checked > 100


def test_a_version_that_leaves_no_room_for_later_ones_is_refused() -> None:
    job = make_job(num_envs=1, policy="versioned", action="box", lengths=5)
    with make_fleet(job, workers=1) as fleet:
        for version in (2**62 + 1, 2**63):
            with pytest.raises(WeightsError, match=f"{version} is past {2**62}, the highest allowed"):
                fleet.publish(numbered(1), version=version)
        assert fleet.version == 0
        assert fleet.publish(numbered(1), version=2**62, wait_s=30).applied == ("cpu-0",)
        assert fleet.publish(numbered(2), wait_s=30).version == 2**62 + 1
        saved = fleet.state()
    with make_fleet(job, workers=1, starts_paused=True) as fleet:
        fleet.restore(saved)
        assert fleet.receipt(2**62 + 1, wait_s=30).applied == ("cpu-0",)


def test_nan_actions_of_published_weights_cost_a_worker_and_no_job() -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=5, step_s=0.001)
    with reading(job, workers=1) as (fleet, reader):
        fleet.publish({name: weight * float("nan") for name, weight in numbered(1).items()}, allow_nonfinite=True)
        until(lambda: fleet.stats().restarts > 0)
        version = fleet.publish(numbered(2)).version
        until(lambda: fleet.receipt(version).applied == ("cpu-0",))
        versions = [int(reader.next_batch(60)["collector", "policy_version"].min()) for _ in range(8)]
        assert set(versions) <= {0, 2}
        assert versions[-1] == 2


def test_a_refusal_is_in_the_receipt_and_holds_nobody_up() -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=5, step_s=0.001)
    with reading(job, workers=1) as (fleet, reader), structlog.testing.capture_logs() as lines:
        blob = WeightsBlob.of({"policy": {"number": torch.tensor(9.0)}})
        for version in (1, 2):
            with fleet._changed:  # past the fleet's own check, which knows what workers accept
                fleet._core.offers.publish(blob, PolicyVersion(version), fleet._engine.share(blob.memory))
            until(lambda number=version: fleet.skip(timeout_s=30) and fleet.receipt(number).refused)
        for receipt in (fleet.receipt(1), fleet.receipt(2)):  # it will not apply the first after the second
            assert (receipt.applied, receipt.waiting) == ((), ())
            assert "missing: policy/bias; nothing was applied" in receipt.refused["cpu-0"]
        for _ in range(5):
            batch = reader.next_batch(timeout=30)
            assert batch is not None
            assert int(batch["collector", "policy_version"].max()) == 0
        assert fleet.publish(numbered(3), wait_s=30).applied == ("cpu-0",)
        assert fleet.receipt(2).refused == {}
        assert {line["worker"] for line in lines if line["event"] == "weights_refused"} == {"cpu-0"}


def test_every_publish_is_reported_under_reset_at_each_batch() -> None:
    # Most of the time goes into resets: weights come between the worker's look at the offer and the collector's.
    slow = {"how": "slow", "at": "reset", "seconds": 0.02}
    collection = {"framesPerBatch": 4, "resetAtEachBatch": True}
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=5, collection=collection, failures=[slow])
    with make_fleet(job, workers=1) as fleet, Repeated(lambda: fleet.skip(timeout_s=30), every_s=0):
        for version in range(1, 13):
            assert fleet.publish(numbered(version), wait_s=20).applied == ("cpu-0",), version
