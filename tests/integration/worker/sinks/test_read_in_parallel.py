"""A dataset read by the workers of torch's DataLoader and by the ranks of a training job, all real processes."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from tensordict import TensorDict
from torch.utils.data import DataLoader

import cormorant
from cormorant_testing.collecting import make_job

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


def frames_of(batches: Iterable[TensorDict]) -> list[tuple[float, ...]]:
    """What tells frames apart: an observation has the environment's seed, its episode and its step."""
    return [tuple(row) for batch in batches for row in batch["observation"].tolist()]


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
        epochs.append(frames_of(loader))
    assert len(set(epochs[0])) == FRAMES
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert (epochs[0] != epochs[1]) == shuffle


@pytest.mark.slow
def test_ranks_of_a_training_job_never_see_the_same_frame(uri: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, tmp_path / "store", uri, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    lines = [rank.communicate(timeout=90)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(lines[0]) == len(lines[1]) > 20
    found = [tuple(row) for line in (*lines[0], *lines[1]) for row in json.loads(line)]
    assert len(set(found)) == len(found) == 16 * 2 * len(lines[0])
