"""What `env.info` and `collection.episodeMetrics` cost CartPole: the same collector with and without them, in turn."""

import time
from statistics import median
from typing import Any

from benchmarks.micro import rows
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.collector import Collector
from cormorant_worker.launch import make_collector

NUM_ENVS, STEPS = 64, 128
KEYS = ({"key": "elapsed_step"}, {"key": "env_id"})
METRICS = ({"name": "longest", "key": "elapsed_step", "reduce": "max"}, {"name": "last", "key": "env_id"})


def _collector(*, info: tuple[dict[str, Any], ...] = (), metrics: tuple[dict[str, Any], ...] = ()) -> Collector:
    env: dict[str, Any] = {"envpool": {"taskId": "CartPole-v1", "numEnvs": NUM_ENVS, "numThreads": 1}}
    collection: dict[str, Any] = {"framesPerBatch": NUM_ENVS * STEPS, "seed": 1}
    if info:
        env["info"] = list(info)
    if metrics:
        collection["episodeMetrics"] = list(metrics)
    return make_collector(
        {
            "apiVersion": "cormorant.dev/v1alpha1",
            "kind": "CollectorJob",
            "metadata": {"name": "cartpole"},
            "spec": {
                "env": env,
                "policy": {"entrypoint": "cormorant.policies:mlp"},
                "collection": collection,
            },
        }
    )


def measure(*, quick: bool) -> list[dict]:
    """Rows of the report."""
    with _collector() as plain, _collector(info=KEYS) as stored, _collector(info=KEYS, metrics=METRICS) as reported:
        collectors = (plain, stored, reported)
        blocks = [Block(collector.layout(STEPS)) for collector in collectors]
        without, *others = rows.interleaved(
            *(
                lambda collector=collector, block=block: collector.fill(block, NUM_ENVS * STEPS)
                for collector, block in zip(collectors, blocks, strict=True)
            ),
            rounds=20 if quick else 100,
            clock=time.process_time,
        )
    step_us = 1e6 * median(without) / STEPS
    return [
        rows.row(
            what,
            100 * (rows.median_ratio(times, without) - 1),
            "% of a batch's time",
            bar=bar,
            note=f"{NUM_ENVS} environments, untrained policy, {step_us:.0f} us of processor time a step without",
        )
        for what, times, bar in (
            ("two keys of info on CartPole", others[0], ""),
            ("two keys and two episode metrics on CartPole", others[1], "< 2"),
        )
    ]


if __name__ == "__main__":
    rows.main(measure)
