"""The same tests on both engines and both placements of the policy: `@on_both_engines_slowly` runs a test once more on
a Ray cluster of this machine, `@on_all_placements_slowly` with inference servers, too. `make test` leaves those out.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cormorant_contract.job import CollectorJob
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions, RayOptions
from cormorant_worker.fleet.slot import WorkerStats
from cormorant_worker.launch import load_job
from cormorant_worker.local_fleet import LocalFleet

RAY, SERVED = (pytest.param(name, marks=pytest.mark.slow) for name in ("ray", "local-served"))
on_both_engines_slowly = pytest.mark.parametrize("engine", ["local", RAY], indirect=True)
on_all_placements_slowly = pytest.mark.parametrize("engine", ["local", RAY, SERVED], indirect=True)

ENGINE = ["local"]
"""The engine of the test that runs now; set by the fixture `engine`."""


def make_fleet(job: CollectorJob, **options: object) -> WorkerFleet:
    engine, _, placement = ENGINE[0].partition("-")
    if placement:
        job = served(job)
    return open_on(engine, job, FleetOptions(**options))


@contextmanager
def reading(job: CollectorJob, **options: object) -> Iterator[tuple[WorkerFleet, LocalFleet]]:
    """`make_fleet`, and what takes its batches."""
    with make_fleet(job, **options) as fleet:
        yield fleet, LocalFleet(fleet)


def open_on(engine: str, job: CollectorJob, options: FleetOptions) -> WorkerFleet:
    if engine == "local":
        return WorkerFleet(job, options)
    from cormorant_worker.fleet.ray.engine import RayEngine

    # The cluster has no CPUs to ask for; see `ray_cluster`.
    return WorkerFleet(job, options, engine=RayEngine(RayOptions(num_cpus=0)))


def served(job: CollectorJob, *, servers: int = 1) -> CollectorJob:
    """The same job with inference servers, which act 0 where it acts randomly."""
    document = job.to_document()
    if "random" in document["spec"]["policy"]:
        document["spec"]["policy"] = {"entrypoint": "cormorant_testing.policies:constant", "kwargs": {"action": 0}}
    document["spec"]["workerGroups"] = [{"name": "cpu"}, {"name": "act", "role": "inference", "replicas": servers}]
    return load_job(document)


def collecting(fleet: WorkerFleet) -> list[WorkerStats]:
    """Workers that step environments, in the order of their slots."""
    return [worker for worker in fleet.stats().workers if not worker.name.startswith("act-")]


def balance(fleet: WorkerFleet) -> int:
    """Frames stepped that are neither accepted nor dropped."""
    stats = fleet.stats()
    return stats.stepped_frames - stats.frames - sum(stats.dropped.values())
