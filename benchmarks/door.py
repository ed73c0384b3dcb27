"""This project through its door in Tianshou's words: one process, the policy that ships, the latest batch kept."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import envpool

from benchmarks import protocol
from benchmarks.workloads import Workload, num_cores
from cormorant_worker import policies
from cormorant_worker.tianshou import Collector, LatestBatch


@contextmanager
def open_door(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    pool = envpool.make(
        workload.task_id, env_type="gymnasium", num_envs=workload.num_envs, num_threads=num_cores(), seed=7
    )
    make = None if workload.policy == "random" else getattr(policies, workload.policy)
    policy = make and make(pool.observation_space, pool.action_space)
    frames = workload.steps_per_batch * workload.num_envs
    with Collector(policy, pool, LatestBatch(), seed=7) as collector:
        yield lambda: collector.collect(n_step=frames).n_collected_steps


if __name__ == "__main__":
    protocol.main(open_door)
