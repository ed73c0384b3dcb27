"""Publishing to a local fleet in the middle of collecting: when weights act, who gets them, who refuses them."""

import threading
import time
from collections import defaultdict

import pytest
import structlog
import torch

from cormorant_testing.collecting import make_job
from cormorant_testing.fleets import make_fleet, reading
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import until
from cormorant_worker.errors import WeightsError
from cormorant_worker.fleet.events import FleetEvent
from cormorant_worker.weights.blob import WeightsBlob, to_bytes
from cormorant_worker.weights.staged import PolicyVersion

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
    with reading(job, workers=1) as (fleet, reader):
        blob = WeightsBlob.of({"policy": {"number": torch.tensor(9.0)}})
        deadline = time.monotonic() + 30
        for version in (1, 2):
            with fleet._changed:  # past the fleet's own check, which knows what workers accept
                fleet._core.offers.publish(blob, PolicyVersion(version), fleet._engine.share(blob.memory))
            while not fleet.receipt(version).refused:
                assert time.monotonic() < deadline
                reader.next_batch(timeout=30)
        for receipt in (fleet.receipt(1), fleet.receipt(2)):  # it will not apply the first after the second
            assert (receipt.applied, receipt.waiting) == ((), ())
            assert "missing: policy/bias; nothing was applied" in receipt.refused["cpu-0"]
        for _ in range(5):
            batch = reader.next_batch(timeout=30)
            assert batch is not None
            assert int(batch["collector", "policy_version"].max()) == 0
        assert fleet.publish(numbered(3), wait_s=30).applied == ("cpu-0",)
        assert fleet.receipt(2).refused == {}


def test_every_publish_is_reported_under_reset_at_each_batch() -> None:
    # Most of the time goes into resets: weights come between the worker's look at the offer and the collector's.
    slow = {"how": "slow", "at": "reset", "seconds": 0.02}
    collection = {"framesPerBatch": 4, "resetAtEachBatch": True}
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=5, collection=collection, failures=[slow])
    with make_fleet(job, workers=1) as fleet:
        over = threading.Event()
        taking = threading.Thread(target=lambda: [fleet.skip(timeout_s=30) for _ in iter(over.is_set, True)])
        taking.start()
        try:
            for version in range(1, 13):
                assert fleet.publish(numbered(version), wait_s=20).applied == ("cpu-0",), version
        finally:
            over.set()
            taking.join(60)


def test_what_an_environment_logs_harms_neither_it_nor_the_fleet() -> None:
    env = {"entrypoint": "cormorant_testing.envs:LogsAnything", "vectorization": "inline", "numEnvs": 1}
    with structlog.testing.capture_logs() as lines:
        with reading(make_job(env={"gymnasium": env}), workers=1) as (_, reader):
            assert reader.next_batch(timeout=30) is not None
        said = next(line for line in lines if line["event"] == "said")
    assert (said["worker"], said["env_worker"], said["event_kind"], said["step"]) == ("cpu-0", "mine", "step", 0)
    assert said["lock"].startswith("<unlocked _thread.lock")
    exploded = next(line for line in lines if line["event"] == "exploded")
    assert (exploded["env_level"], exploded["log_level"]) == (3, "info")
