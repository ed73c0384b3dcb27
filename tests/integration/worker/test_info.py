"""Declared keys of info from subprocesses, EnvPool and fleets, frame by frame."""

from typing import Any

import numpy as np
import pytest
import torch

from cormorant_testing.collecting import COUNTING, make_job
from cormorant_testing.info import INFO, assert_info
from cormorant_worker.collect.block import Block
from cormorant_worker.errors import CormorantError
from cormorant_worker.launch import make_collector

COUNTED = {
    "gymnasium": {
        "entrypoint": COUNTING, "vectorization": "subprocess", "numEnvs": 2,
        "kwargs": {"lengths": [4, 3, 7], "ends": "alternate"},
    }
}  # fmt: skip


def pool(task: str, **fields: Any) -> dict[str, Any]:
    return {"envpool": {"taskId": task, "numEnvs": 4, "numThreads": 1, **fields}}


def test_info_of_subprocesses_is_exact() -> None:
    with make_collector(make_job(env=COUNTED, info=INFO)) as collector:
        for _ in range(2):
            assert_info(collector.collect(num_steps=31))


def test_info_that_a_subprocess_cannot_store_gets_a_sentence() -> None:
    job = make_job(env=COUNTED, info=[{"key": "pair", "dtype": "uint8", "shape": [1]}])
    with pytest.raises(CormorantError, match=r"returned pair of shape \[2\]"), make_collector(job) as collector:
        collector.collect(num_steps=4)


@pytest.mark.parametrize("batch_size", [0, 2])
def test_elapsed_step_of_envpool_counts_the_frames_of_an_episode(batch_size: int) -> None:
    job = make_job(
        env=pool("CartPole-v1", batchSize=batch_size),
        info=[{"key": "elapsed_step"}],
    )
    with make_collector(job) as collector:
        batches = torch.cat([collector.collect(num_steps=400) for _ in range(3)], dim=1)
    elapsed, done = batches["next", "info", "elapsed_step"], batches["next", "done"].squeeze(-1)
    assert elapsed.dtype == torch.int32
    assert done.sum() > 10
    count = torch.zeros(len(elapsed), dtype=torch.int32)
    for t in range(elapsed.shape[1]):
        count += 1
        assert torch.equal(elapsed[:, t], count)
        count[done[:, t]] = 0


def test_info_that_envpool_does_not_have_names_what_it_has() -> None:
    job = make_job(env=pool("CartPole-v1"), info=[{"key": "elapsed_steps"}])
    with pytest.raises(CormorantError, match=r"CartPole-v1 has no elapsed_steps .* did you mean elapsed_step"):
        make_collector(job)


def test_envpool_info_is_stored_as_the_declared_dtype() -> None:
    job = make_job(env=pool("CartPole-v1"), info=[{"key": "elapsed_step", "dtype": "float32"}])
    with make_collector(job) as collector:
        assert collector.collect(num_steps=8)["next", "info", "elapsed_step"].tolist() == [[1.0, 2.0]] * 4


def test_metrics_of_an_asynchronous_pool_are_those_of_its_episodes() -> None:
    metrics = [{"name": how, "key": "elapsed_step", "reduce": how} for how in ("last", "sum", "mean", "max", "any")]
    job = make_job(
        env=pool("CartPole-v1", batchSize=2),
        info=[{"key": "elapsed_step"}],
        collection={"framesPerBatch": 400, "episodeMetrics": metrics},
    )
    with make_collector(job) as collector:
        episodes = [collector.fill(Block(collector.layout(100)), 400).episodes for _ in range(3)]
    for lengths, found in ((np.array(each.lengths), each.metrics) for each in episodes):
        assert len(lengths) > 3
        assert found["last"] == found["max"] == lengths.tolist()
        assert found["sum"] == (lengths * (lengths + 1) / 2).tolist()
        assert found["mean"] == ((lengths * (lengths + 1) / 2) / lengths).tolist()
        assert found["any"] == [1.0] * len(lengths)
