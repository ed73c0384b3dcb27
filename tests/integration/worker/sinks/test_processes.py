"""Datasets and real processes: writers that are killed, disks that are full, readers in parallel."""

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

import cormorant
from cormorant_testing.collecting import make_job
from cormorant_testing.datasets import described
from cormorant_testing.scripts import Logged, environment, start_script
from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks.dataset import existing_dataset, open_dataset
from cormorant_worker.sinks.verify import verify

SCRIPT = Path(__file__).with_name("writer_process.py")
SHARD_FRAMES = 192
"""5,000 bytes of 42-byte frames, in batches of 64."""


def start(folder, attempt, *more):
    return Logged([sys.executable, str(SCRIPT), str(folder), str(attempt), *map(str, more)], env=environment())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_kill_9_at_any_moment_loses_at_most_the_open_shard(tmp_path, seed):
    dice = random.Random(seed)
    workers = [start(tmp_path, attempt) for attempt in range(4)]
    promised = []
    for worker in workers:
        with worker:
            while not worker.text:
                assert worker.process.poll() is None
                time.sleep(0.001)
            time.sleep(dice.random() * 0.02)
        lines = [line for line in worker.text.splitlines(keepends=True) if line.endswith("\n")]
        promised.append([int(number) for number in lines[-1].split()])

    assert verify(str(tmp_path)).problems == ()
    dataset = existing_dataset(str(tmp_path))
    for part, (durable, appended) in zip(dataset.parts(), promised, strict=True):
        found = [frames.reward for frames in dataset.iter_frames(part)]
        np.testing.assert_array_equal(np.concatenate([np.zeros(0), *found]), np.arange(part.frames))  # without a hole
        for frames in dataset.iter_frames(part):
            np.testing.assert_array_equal(next(frames.following())[:, 0], frames.reward + 4)
        assert durable <= part.frames
        assert part.frames >= appended - SHARD_FRAMES


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip("only root may mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("shard_bytes", [20_000, 200_000, 10_000_000])
def test_a_full_disk_is_told_and_sealed_shards_are_kept(small_disk, shard_bytes):
    with start(small_disk / "data", 0, shard_bytes) as worker:
        assert worker.wait() == 3
    last = worker.text.splitlines()[-1]
    told = re.search(
        r"^error .*/data/cpu-0-0 cannot be written: No space left on device \(about \d+ bytes are needed\); "
        r"(\d+) frames in sealed shards are kept, (\d+) frames of the open shard are lost; ",
        last,
    )
    assert told, last
    report = verify(str(small_disk / "data"))
    assert report.problems == ()
    assert report.frames == int(told[1])
    assert int(told[2]) > 0
    assert not [*(small_disk / "data").rglob("*.open")]
    assert report.frames > 5000 or shard_bytes > 1 << 20


def test_a_read_only_disk_is_told(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    _, description = described(num_rows=1, num_envs=1)
    with pytest.raises(DatasetError, match=r"disk/data cannot be written: Read-only file system"):
        open_dataset(str(small_disk / "data"), description)


FRAMES = 1000
RANK = """
import sys, torch, cormorant
from torch.utils.data import DataLoader
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[3]), world_size=2)
frames = cormorant.read_dataset(sys.argv[2]).to_torch(batch_size=16, shuffle=True, drop_last=True)
for batch in DataLoader(frames, batch_size=None, collate_fn=frames.collate, num_workers=2):
    print(batch["observation"].tolist())
    torch.distributed.all_reduce(torch.ones(1))  # hangs if another rank has fewer batches
"""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What two real workers collected, whose environments count their steps."""
    uri = str(tmp_path_factory.mktemp("data") / "counted")
    collection = {"framesPerBatch": 32, "totalFrames": FRAMES}
    with cormorant.open_fleet(make_job(dataset=uri, num_envs=4, collection=collection), workers=2) as fleet:
        assert fleet.wait_until_done(60)
    return uri


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_of_a_data_loader_share_every_frame(uri: str, start: str, shuffle: bool) -> None:
    stream = cormorant.read_dataset(uri).to_torch(batch_size=16, shuffle=shuffle)
    loader = DataLoader(
        stream,
        batch_size=None,
        collate_fn=stream.collate,
        num_workers=2,
        multiprocessing_context=start,
        persistent_workers=True,
    )
    epochs = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        # The environment's seed, its episode and its step tell frames apart.
        epochs.append([tuple(row) for batch in loader for row in batch["observation"].tolist()])
    assert len(set(epochs[0])) == FRAMES
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert (epochs[0] != epochs[1]) == shuffle


@pytest.mark.slow
def test_ranks_of_a_training_job_never_see_the_same_frame(uri: str, tmp_path: Path) -> None:
    ranks = [start_script(RANK, str(tmp_path / "store"), uri, str(rank)) for rank in range(2)]
    lines = [rank.communicate(timeout=90)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(lines[0]) == len(lines[1]) > 20
    found = [tuple(row) for line in (*lines[0], *lines[1]) for row in json.loads(line)]
    assert len(set(found)) == len(found) == 16 * 2 * len(lines[0])
