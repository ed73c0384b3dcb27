"""This project through its doors in others' words, with the policy that ships, the latest batch kept.

`--words tianshou`: its Collector in one process. `--words torchrl`: `sync_async_collector` on two processes that share
the environments, as TorchRL's MultiAsync has them.
"""

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import envpool

from benchmarks import protocol
from benchmarks.workloads import Workload, num_cores
from cormorant import policies
from cormorant.tianshou import Collector, LatestBatch
from cormorant.torchrl import MultiThreadedEnv, sync_async_collector

WORKERS = 2


@contextmanager
def open_door(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    with (_open_tianshou if args.words == "tianshou" else _open_torchrl)(workload) as take:
        yield take


@contextmanager
def _open_tianshou(workload: Workload) -> Iterator[protocol.Take]:
    pool = envpool.make(
        workload.task_id, env_type="gymnasium", num_envs=workload.num_envs, num_threads=num_cores(), seed=7
    )
    frames = workload.steps_per_batch * workload.num_envs
    with Collector(_policy(workload), pool, LatestBatch(), seed=7) as collector:
        yield lambda: collector.collect(n_step=frames).n_collected_steps


@contextmanager
def _open_torchrl(workload: Workload) -> Iterator[protocol.Take]:
    num_envs = workload.share(WORKERS)
    make_env = functools.partial(
        MultiThreadedEnv,
        num_envs,
        workload.task_id,
        create_env_kwargs={"num_threads": max(1, num_cores() // WORKERS)},
        categorical_action_encoding=True,
    )
    frames = workload.steps_per_batch * num_envs
    with sync_async_collector(
        make_env, num_collectors=WORKERS, policy=_policy(workload), frames_per_batch=frames, total_frames=-1
    ) as collector:
        batches = iter(collector)
        yield lambda: sum(_size(next(batches)) for _ in range(WORKERS))


def _policy(workload: Workload) -> Any:
    if workload.policy == "random":
        return None
    spec = envpool.make_spec(workload.task_id)
    return getattr(policies, workload.policy)(spec.gymnasium_observation_space, spec.gymnasium_action_space)


def _size(batch: Any) -> int:
    return int(batch.numel())


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--words", choices=("tianshou", "torchrl"), default="tianshou")


if __name__ == "__main__":
    protocol.main(open_door, _arguments)
