"""`collection.normalize` with real workers: the fleet's statistics, what policies saw, kills, states."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from cormorant_testing.collecting import ExpectedMoments, make_job, seen_of
from cormorant_testing.fleets import make_fleet, reading
from cormorant_testing.policies import numbered
from cormorant_worker.errors import BatchTimeout
from cormorant_worker.launch import load_job
from cormorant_worker.sinks.dataset import existing_dataset

NORMALIZE = {"observation": {"clip": 3}, "reward": {"gamma": 0.9}}


def job_of(total: int, **options: Any) -> Any:
    collection = {"totalFrames": total, "normalize": NORMALIZE, **options.pop("collection", {})}
    return make_job(policy="seer", action="box", lengths=(3, 7), collection=collection, **options)


def test_weights_may_be_published_before_the_first_batch() -> None:
    with reading(job_of(60), workers=1) as (fleet, reader):
        fleet.publish(numbered(1), wait_s=60)
        while (batch := reader.next_batch(copy=True)) is not None:
            seen_of(batch, fleet.statistics)
            assert fleet.statistics[1]["observation"]["count"] == 0
        assert fleet.stats().restarts == 0


def test_killed_workers_neither_lose_nor_double_frames_in_the_statistics() -> None:
    expected = ExpectedMoments()
    with reading(job_of(800, step_s=0.0005), workers=2) as (fleet, reader):
        while (batch := reader.next_batch(copy=True)) is not None:
            expected.take(batch)
            seen_of(batch, fleet.statistics)
            if len(expected.seen) in (200, 400):
                os.kill(next(worker.pid for worker in fleet.stats().workers if worker.pid), signal.SIGKILL)
                fleet.publish(numbered(fleet.version + 1))
        assert len(expected.seen) == 800
        assert fleet.stats().restarts >= 1
        expected.check(fleet.statistics.current)


def test_a_loan_counts_when_it_is_acknowledged_and_once() -> None:
    with make_fleet(job_of(80), workers=1) as fleet:
        first, second = fleet.borrow(), fleet.borrow()
        assert fleet.statistics.current.count == 0
        second.acknowledge()
        second.acknowledge()
        assert fleet.statistics.current.count == second.num_frames == 20
        first.release()
        second.release()
        assert fleet.statistics.current.count == 20


def test_a_restored_fleet_goes_on_with_its_statistics() -> None:
    job = job_of(400, workers=1)
    expected = ExpectedMoments()
    with reading(job, workers=1) as (fleet, reader):
        for _ in range(3):
            expected.take(reader.next_batch(copy=True))
        fleet.publish(numbered(5), version=5, wait_s=60)
        fleet.pause()
        while True:  # nothing is left that the state would not hold
            try:
                expected.take(reader.next_batch(copy=True, timeout=0.5))
            except BatchTimeout:
                break
        saved = fleet.state()
        before = dict(fleet.statistics)
        current = fleet.statistics.current.document()
    with reading(job, workers=1) as (fleet, reader):
        reader.next_batch()  # of its own, and forgotten
        fleet.restore(saved)
        assert fleet.statistics.current.document() == current
        assert fleet.statistics[5] == before[5]
        assert before[5]["observation"]["count"] > 0
        seen = set()
        while (batch := reader.next_batch(copy=True)) is not None:
            seen |= set(batch["collector", "policy_version"].unique().tolist())
            seen_of(batch, before)  # the very same statistics act again
            expected.take(batch)
        assert seen == {5}
        # Up to two batches were under way when the state was saved: it counts them, and they were never handed over.
        found = fleet.statistics.current.moments["observation"]
        assert found.count == len(expected.seen) >= 360
        assert np.abs(found.mean - np.array(expected.seen).mean(axis=0)).max() <= 1e-9 * np.abs(found.mean).max()


def test_a_dataset_tells_the_next_run_the_statistics_of_its_frames(tmp_path: Path) -> None:
    uri = (tmp_path / "data").as_uri()
    with reading(job_of(200, dataset=uri, queue={"capacityBatches": 2}), workers=2) as (fleet, reader):
        while reader.next_batch() is not None:
            pass
        wanted = fleet.statistics.current
    found = existing_dataset(uri)
    frames = [part.statistics.moments["observation"].count for part in found.parts()]
    assert sum(frames) == found.frames == 200
    with reading(job_of(400, dataset=uri, queue={"capacityBatches": 2}), workers=2) as (fleet, reader):
        before = fleet.statistics.current
        for name in ("observation", "next/reward"):
            assert before.moments[name].count == 200
            close = np.abs(before.moments[name].mean - wanted.moments[name].mean).max()
            assert close <= 1e-9 * np.abs(wanted.moments[name].mean).max()
        while reader.next_batch() is not None:
            pass
        assert fleet.statistics.current.count == 400


def test_statistics_in_a_weights_file_are_gone_on_from(tmp_path: Path) -> None:
    shape = {"count": 50, "mean": [5.0, 1.0, 2.0, 3.0], "m2": [50.0] * 4, "clip": 3.0}
    reward = {"count": 50, "mean": 1.0, "m2": 50.0, "clip": 10.0}
    document = {"observation": shape, "next/reward": reward}
    path = tmp_path / "policy.safetensors"
    save_file(numbered(1), path, metadata={"cormorant_statistics": json.dumps(document)})
    plain = job_of(40).to_document()
    plain["spec"]["policy"]["initialWeights"] = path.as_uri()
    with reading(load_job(plain), workers=1) as (fleet, reader):
        assert fleet.statistics[0] == fleet.statistics.current.document() == document
        seen_of(reader.next_batch(copy=True), fleet.statistics)
        assert fleet.statistics.current.count == 50
        reader.next_batch()
        assert fleet.statistics.current.count == 70
