"""TorchRL 0.14.1's collectors on EnvPool: `--collector single | multi_sync | multi_async | ray`.

`single` has all environments and a thread a core (one thread for 8 environments, where that was faster); the others
have two workers with half of each. The defaults of the
options below are the settings that were fastest for TorchRL when each was tried alone (README.md, "Peers").
"""

import argparse
import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import torch
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import RayCollector

from benchmarks import protocol
from benchmarks.peers.torchrl_env import make_env, make_policy, valid_frames
from benchmarks.workloads import Workload, num_cores

WORKERS = 2
SMALL = 8
ENDLESS = sys.maxsize
"""RayCollector collects nothing with its default of -1."""


@contextmanager
def open_torchrl(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    workers = 1 if args.collector == "single" else WORKERS
    threads = args.env_threads or _best_threads(workload, workers)
    frames_per_worker = workload.steps_per_batch * workload.share(workers)
    makers = [
        functools.partial(
            make_env, workload, num_envs=workload.share(workers), num_threads=threads, seed=1000 * (index + 1)
        )
        for index in range(workers)
    ]
    policy = make_policy(workload, args.policy)
    common = {"total_frames": -1, "compact_obs": args.compact_obs}
    if args.device:
        common |= {"policy_device": args.device, "env_device": "cpu", "storing_device": "cpu"}
    match args.collector:
        case "single":
            collector = Collector(makers[0], policy, frames_per_batch=frames_per_worker, **common)
        case "multi_sync":
            collector = MultiSyncCollector(makers, policy, frames_per_batch=frames_per_worker * workers, **common)
        case "multi_async":
            collector = MultiAsyncCollector(makers, policy, frames_per_batch=frames_per_worker, **common)
        case "ray":
            collector = _ray_collector(makers, policy, args, frames_per_worker)
    batches_per_take = workers if args.collector in ("multi_async", "ray") and not args.ray_sync else 1
    batches = iter(collector)

    def take() -> int:
        return sum(valid_frames(next(batches)) for _ in range(batches_per_take))

    try:
        with torch.no_grad():
            yield take
    finally:
        collector.shutdown()
        if ray.is_initialized():
            ray.shutdown()


def _best_threads(workload: Workload, workers: int) -> int:
    """EnvPool threads of a worker: its part of the cores, but one where a second does not pay for its waking."""
    return 1 if workload.num_envs <= SMALL else max(1, num_cores() // workers)


def _ray_collector(makers: list, policy: object, args: argparse.Namespace, frames_per_worker: int) -> RayCollector:
    ray.init(address="local", num_cpus=max(num_cores(), WORKERS), include_dashboard=False, log_to_driver=False)
    return RayCollector(
        makers,
        policy,
        frames_per_batch=frames_per_worker * (WORKERS if args.ray_sync else 1),
        total_frames=ENDLESS,
        sync=args.ray_sync,
        collector_kwargs={"compact_obs": args.compact_obs},
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--collector", choices=("single", "multi_sync", "multi_async", "ray"), default="single")
    parser.add_argument("--env-threads", type=int, default=0, help="of each worker; 0 = its part of the cores")
    parser.add_argument("--policy", choices=("module", "actor"), default="module")
    parser.add_argument("--device", default="", help="of the policy, while environments and batches stay on the CPU")
    parser.add_argument("--compact-obs", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--ray-sync", action="store_true")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    protocol.main(open_torchrl, _arguments)
