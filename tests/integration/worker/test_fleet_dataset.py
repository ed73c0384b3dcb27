"""A local fleet with a dataset: what is durable is exact, whoever is killed."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from cormorant_testing.check import Checker
from cormorant_testing.collecting import assert_same, make_checker, make_job
from cormorant_testing.datasets import iter_frames
from cormorant_testing.fleets import make_fleet, reading
from cormorant_testing.scripts import until
from cormorant_worker.errors import DatasetError, DatasetMismatch, StateError
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.sinks.dataset import existing_dataset
from cormorant_worker.sinks.frames import Frames
from cormorant_worker.sinks.verify import verify

OPTIONS = {"lengths": [3, 8, 5], "ends": "alternate"}


def job_of(folder: Path, total: int, **more: Any) -> Any:
    """A job with a recurrent policy and a dataset."""
    collection = {"totalFrames": total, **more.pop("collection", {})}
    more = {"queue": {}, **OPTIONS, **more}
    return make_job(num_envs=2, policy="counter", dataset=str(folder), collection=collection, **more)


@pytest.mark.parametrize("kept", [{}, {"collection": {"episodes": {"count": 3}}, "queue": None}])
def test_no_process_can_read_what_others_keep_in_memory(kept: dict[str, Any]) -> None:
    job = make_job(num_envs=2, dataset="memory://frames", **({"collection": {"totalFrames": 9}} | kept))
    alone = "memory://frames: each process has a memory of its own"
    with pytest.raises(DatasetError, match=alone):
        make_fleet(job, workers=1)


def as_batch(frames: Frames, num_envs: int) -> TensorDict:
    """Stored frames as the batch `[B, T]` that they were."""
    rows = [torch.from_numpy(np.flatnonzero(frames.env == env)) for env in range(num_envs)]
    mask = pad_sequence([torch.ones(len(found), dtype=torch.bool) for found in rows], batch_first=True)
    batch: TensorDict = frames.to_tensordict()[pad_sequence(rows, batch_first=True)]
    batch["collector", "mask"] = mask
    batch.names = [None, "time"]
    return batch


def check_all(uri: str, **options: object) -> Checker:
    """Every value of every durable frame."""
    checker = make_checker(2, **options)
    for frames in iter_frames(existing_dataset(uri)):
        checker.take(as_batch(frames, 2))
    report = verify(uri)
    assert report.is_good, report
    return checker


def test_durable_frames_are_exact_and_a_rerun_continues(tmp_path: Path) -> None:
    uri, job = str(tmp_path / "data"), partial(job_of, tmp_path / "data")
    delivered = make_checker(2, **OPTIONS)
    with make_fleet(job(330), workers=1) as fleet:
        for batch in LocalFleet(fleet).batches():
            delivered.take(batch)
        assert fleet.is_done
    assert check_all(uri, **OPTIONS).frames == delivered.frames == 330
    # The same again: there is nothing left to do.
    with reading(job(330), workers=1) as (fleet, reader):
        assert reader.next_batch() is None
        assert fleet.stats().stepped_frames == 0
    # More: another attempt adds the rest, with ids and seeds of its own.
    with make_fleet(job(500), workers=1) as fleet:
        sizes = [batch["collector", "traj_ids"].numel() for batch in LocalFleet(fleet).batches()]
    assert sum(sizes) == 170
    checker = check_all(uri, **OPTIONS)
    assert checker.frames == 500
    assert len(checker.attempts) == 2
    with pytest.raises(DatasetMismatch):
        make_fleet(make_job(num_envs=2, dataset=uri, observation="discrete"), workers=1)


def test_a_lost_worker_that_goes_on_adds_no_frames(tmp_path: Path) -> None:
    manifest = tmp_path / "cpu-0-0/manifest.jsonl"
    with reading(job_of(tmp_path, 200, step_s=0.005), workers=1, seal_after_s=0.0) as (fleet, reader):
        reader.next_batch(timeout=60)
        until(manifest.exists)
        (tmp_path / "cpu-0-1").mkdir()  # another process has the part of the first replacement
        os.kill(fleet.stats().workers[0].pid, signal.SIGKILL)
        while reader.next_batch(timeout=60) is not None:
            pass
        assert fleet.stats().restarts == 2
    # As it would on a node that is cut off from its head, and not from the dataset.
    store, lines = existing_dataset(str(tmp_path)).store, manifest.read_text().splitlines()
    with pytest.raises(OSError, match=f"a head of this job ended the part after {len(lines)} shards"):
        store.note("cpu-0-0", len(lines), lines[-1])
    assert check_all(str(tmp_path), gaps=True, **OPTIONS).frames == 200
    assert (tmp_path / "cpu-0-2/manifest.jsonl").exists()
    assert not (tmp_path / "cpu-0-2/ended.json").exists(), "this one finished"


@pytest.mark.slow
def test_what_an_idle_worker_sealed_is_not_collected_again(tmp_path: Path) -> None:
    job = job_of(tmp_path, 400, queue={"capacityBatches": 1}, collection={"mode": "async"})
    with reading(job, workers=1) as (fleet, reader):
        until(lambda: existing_dataset(str(tmp_path)).frames > 0)  # the queue is full: the worker has nothing to do
        (worker,) = fleet.stats().workers
        sealed = existing_dataset(str(tmp_path)).frames
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: fleet.stats().restarts == 1)
        # What it sealed was kept, and is counted before anybody collects anew.
        assert fleet._core.scheduler.landed_frames == sealed
        while reader.next_batch() is not None:
            pass
        assert fleet.wait_until_done(30)
        assert fleet.stats().dropped.get("crash", 0) < 20
    assert check_all(str(tmp_path), gaps=True, **OPTIONS).frames == 400


@pytest.mark.slow
def test_a_state_that_the_dataset_has_passed_writes_no_row_twice(tmp_path: Path) -> None:
    job = job_of(tmp_path, 600)
    with reading(job, workers=2) as (fleet, reader):
        for _ in range(3):
            reader.next_batch()
        saved = fleet.state()
        for _ in range(5):
            reader.next_batch()
        fleet.restore(saved)  # into the same fleet
        assert reader.next_batch() is not None
    with reading(job, workers=2) as (fleet, reader):
        fleet.restore(saved)
        assert sum(batch.numel() for batch in reader.batches()) > 0
    report = verify(str(tmp_path))
    assert (report.frames, report.problems) == (600, ())
    # Not under other names either: no two rows are the same step of the same episode.
    found = list(iter_frames(existing_dataset(str(tmp_path))))
    rows = np.concatenate([frames.observation[0].reshape(len(frames), -1) for frames in found])
    assert len(np.unique(rows, axis=0)) == 600


def test_a_refused_state_leaves_the_count_of_what_is_durable(tmp_path: Path) -> None:
    collection, queue = {"framesPerBatch": 20, "totalFrames": 200}, {"capacityBatches": 1}
    job = make_job(failures=[{"at": "restore"}], dataset=str(tmp_path), collection=collection, queue=queue)
    with reading(job, workers=1) as (fleet, reader):
        until(lambda: fleet._core.queue.backlog)  # durable, and not accepted yet
        fleet.pause()
        with pytest.raises(StateError, match="could not take its state"):
            fleet.restore(fleet.state())
        fleet.resume()
        for _ in reader.batches():
            pass
        assert fleet.wait_until_done(30)
        assert (fleet.stats().frames, existing_dataset(str(tmp_path)).frames) == (200, 200)


def stored(folder: Path) -> TensorDict:
    """Every frame of a dataset, part by part, with its environment and its step of the trajectory."""
    found = [*iter_frames(existing_dataset(str(folder)))]
    places = {name: np.concatenate([getattr(frames, name) for frames in found]) for name in ("env", "step")}
    return torch.cat([frames.to_tensordict() for frames in found]).update(places)


@pytest.mark.slow
def test_a_state_goes_on_where_its_dataset_ends(tmp_path: Path) -> None:
    with make_fleet(job_of(tmp_path / "whole", 400), workers=1) as fleet:
        assert sum(batch.numel() for batch in LocalFleet(fleet).batches()) == 400
        assert fleet.wait_until_done(30)
    with reading(job_of(tmp_path / "halves", 400), workers=1) as (fleet, reader):
        for _ in range(3):
            reader.next_batch()
        fleet.pause()
        saved, collected = fleet.state(), fleet.stats().stepped_frames
    assert collected < 400
    with make_fleet(job_of(tmp_path / "halves", 400), workers=1, starts_paused=True) as fleet:
        assert fleet.found_frames == collected
        fleet.restore(saved)
        fleet.resume()
        assert sum(batch.numel() for batch in LocalFleet(fleet).batches()) == 400 - collected
        assert fleet.wait_until_done(30)
    assert existing_dataset(str(tmp_path / "halves")).part_names() == ("cpu-0-0", "cpu-0-1")
    whole, halves = stored(tmp_path / "whole"), stored(tmp_path / "halves")
    ids = ("collector", "traj_ids")
    assert_same([halves], [whole], but=[ids])
    ours, theirs = whole[ids], halves[ids]
    # What was open goes on under its id, what began afterwards has another epoch: the same trajectories, one to one.
    np.testing.assert_array_equal(theirs[: collected + 1], ours[: collected + 1])
    assert len(np.unique(np.stack([ours, theirs]), axis=1).T) == len(np.unique(ours)) == len(np.unique(theirs))
    assert verify(str(tmp_path / "halves")).problems == ()


def test_workers_write_without_pandas(tmp_path: Path) -> None:
    """pyarrow imports it for `pa.array`, where it is installed: most of a second of each worker's first batch."""
    job = make_job(num_envs=2, dataset=str(tmp_path), queue={"capacityBatches": 1}, **OPTIONS)
    with make_fleet(job, workers=1) as fleet:
        until(lambda: existing_dataset(str(tmp_path)).frames > 0)
        (worker,) = fleet.stats().workers
        mapped = Path(f"/proc/{worker.pid}/maps").read_text()
    assert "pyarrow" in mapped
    assert "pandas" not in mapped
