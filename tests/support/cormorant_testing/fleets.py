"""The same tests on both engines: `@on_both_engines` runs a test once more on a Ray cluster of this machine."""

import pytest

from cormorant_contract.job import CollectorJob
from cormorant_worker.fleet.fleet import Fleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.ray.options import RayOptions

on_both_engines = pytest.mark.parametrize("engine", ["local", "ray"], indirect=True)
on_both_engines_slowly = pytest.mark.parametrize(
    "engine", ["local", pytest.param("ray", marks=pytest.mark.slow)], indirect=True
)
"""Where the Ray half is left out of `make test`."""

ENGINE = ["local"]
"""The engine of the test that runs now; set by the fixture `engine`."""


def make_fleet(job: CollectorJob, **options: object) -> Fleet:
    """A fleet on the engine of the running test."""
    if ENGINE[0] == "local":
        return Fleet(job, FleetOptions(**options))
    from cormorant_worker.fleet.ray.engine import RayEngine

    # The cluster has no CPUs to ask for; see `ray_cluster`.
    return Fleet(job, FleetOptions(**options), engine=RayEngine(RayOptions(num_cpus=0)))


def balance(fleet: Fleet) -> int:
    """Frames stepped that are neither accepted nor dropped."""
    stats = fleet.stats()
    return stats.stepped_frames - stats.frames - sum(stats.dropped.values())
