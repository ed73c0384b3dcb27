"""This project, driven through its Python API.

`--workers N`: a fleet of N local worker processes that share the environments, read as a learner reads it.
`--workers 0`: one collector in this process, without a fleet.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import protocol
from benchmarks.workloads import Workload
from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.batch import to_tensordict
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.build import build_collector
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.local_fleet import LocalFleet

ENTRYPOINTS = {"mlp": "cormorant.policies:mlp", "atari_cnn": "cormorant.policies:atari_cnn"}


def make_job(workload: Workload, *, workers: int, compiled: str = "off", dtype: str = "float32") -> CollectorJob:
    """The manifest of a workload; `numEnvs` is what one worker has."""
    num_envs = workload.share(workers)
    policy = {"random": {}}
    if workload.policy != "random":
        policy = {"entrypoint": ENTRYPOINTS[workload.policy], "compile": compiled, "dtype": dtype}
    spec = {
        "env": {"envpool": {"taskId": workload.task_id, "numEnvs": num_envs}},
        "policy": policy,
        "collection": {"mode": "async", "framesPerBatch": workload.steps_per_batch * num_envs, "seed": 7},
        # As little ahead as the workers need: what waits in the queue has to be thrown away before each measurement.
        "output": {"queue": {"capacityBatches": 2 * max(1, workers)}},
        "workerGroups": [{"name": "cpu", "minReplicas": 1, "maxReplicas": 8}],
        "replicas": workers,
    }
    return CollectorJob.model_validate(
        {
            "apiVersion": "cormorant.dev/v1alpha1",
            "kind": "CollectorJob",
            "metadata": {"name": workload.name},
            "spec": spec,
        }
    )


@contextmanager
def open_ours(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    """A take is one batch from every worker."""
    job = make_job(workload, workers=args.workers or 1, compiled=args.compile, dtype=args.dtype)
    if args.workers == 0:
        with _in_process(job, workload.steps_per_batch, device=args.device) as take:
            yield take
    else:
        with _fleet(job, args.workers, device=args.device) as take:
            yield take


@contextmanager
def _in_process(job: CollectorJob, num_steps: int, *, device: str) -> Iterator[protocol.Take]:
    collector = build_collector(job, WorkerPlace(seed=job.spec.collection.seed, device=device or "cpu"))
    blocks = [Block(collector.layout(num_steps)) for _ in range(2)]

    def take() -> int:
        blocks.reverse()
        collector.fill(blocks[0], blocks[0].layout.num_frames)
        return to_tensordict(blocks[0]).numel()

    with collector:
        yield take


@contextmanager
def _fleet(job: CollectorJob, workers: int, *, device: str) -> Iterator[protocol.Take]:
    with open_local_fleet(job, workers=workers, device=device) as fleet:
        batches = LocalFleet(fleet).batches()

        def take() -> int:
            return sum(next(batches).numel() for _ in range(workers))

        yield take


def open_local_fleet(job: CollectorJob, *, workers: int, device: str = "") -> WorkerFleet:
    """The one place that knows how a fleet is opened."""
    return WorkerFleet(job, FleetOptions(workers=workers, device=device or None))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="", help="of the policy (default: that of the manifest)")
    parser.add_argument("--compile", choices=("off", "auto", "on"), default="off", help="policy.compile")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="policy.dtype")


if __name__ == "__main__":
    protocol.main(open_ours, _arguments)
