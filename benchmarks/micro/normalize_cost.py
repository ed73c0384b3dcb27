"""What `collection.normalize` costs HalfCheetah: the same EnvPool collector with and without it, in turn."""

import time
from statistics import median
from typing import Any

from benchmarks.micro import rows
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.collector import Collector
from cormorant_worker.launch import make_collector
from cormorant_worker.normalize import RunningMoments
from cormorant_worker.weights.staged import PolicyVersion

NUM_ENVS, STEPS = 64, 64


def _collector(**collection: Any) -> Collector:
    return make_collector(
        {
            "apiVersion": "cormorant.dev/v1alpha1",
            "kind": "CollectorJob",
            "metadata": {"name": "cheetah"},
            "spec": {
                "env": {"envpool": {"taskId": "HalfCheetah-v4", "numEnvs": NUM_ENVS, "numThreads": 1}},
                "policy": {"entrypoint": "cormorant.policies:mlp"},
                "collection": {"framesPerBatch": NUM_ENVS * STEPS, "seed": 1, **collection},
            },
        }
    )


def measure(*, quick: bool) -> list[dict]:
    """Rows of the report."""
    with _collector() as plain, _collector(normalize={"observation": {}, "reward": {}}) as normalizing:
        blocks = [Block(collector.layout(STEPS)) for collector in (plain, normalizing)]

        def fill(which: int, collector: Collector) -> None:
            collector.fill(blocks[which], NUM_ENVS * STEPS)

        found = normalizing.fill(blocks[1], NUM_ENVS * STEPS).moments
        assert found is not None
        assert isinstance(found.moments["observation"], RunningMoments)
        normalizing.weights.offer(normalizing.weights.current(), version=PolicyVersion(1), statistics=found)
        without, with_it = rows.interleaved(
            lambda: fill(0, plain),
            lambda: fill(1, normalizing),
            rounds=10 if quick else 40,
            clock=time.process_time,
        )
    share = rows.median_difference(with_it, without) / median(without)
    note = (
        f"{NUM_ENVS} environments, {1e6 * median(without) / NUM_ENVS / STEPS:.1f} us of processor time a frame without"
    )
    return [rows.row("normalize on HalfCheetah", 100 * share, "% of a batch's time", bar="< 3", note=note)]


if __name__ == "__main__":
    rows.main(measure)
