"""Engines for tests of fleets."""

from collections.abc import Iterator

import pytest

from cormorant_testing import fleets
from cormorant_worker.fleet.turn.loop import FleetLoop

FleetLoop.validates = True
STORE_BYTES = 200 << 20


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this machine that outlives the fleets of a module."""
    import ray

    from cormorant_worker.fleet.ray.cluster import RayCluster
    from cormorant_worker.fleet.ray.options import RayOptions

    cluster = RayCluster(RayOptions(object_store_bytes=STORE_BYTES))
    assert ray.is_initialized()
    yield
    cluster.close()
    assert not ray.is_initialized()


@pytest.fixture(autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The engine that `fleets.make_fleet` uses; local, unless a test is marked to run on both."""
    name = getattr(request, "param", "local")
    if name.startswith("ray"):
        request.getfixturevalue("ray_cluster")
    fleets.ENGINE[0] = name
    yield name
    fleets.ENGINE[0] = "local"
