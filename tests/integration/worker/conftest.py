"""Engines for tests of fleets."""

from collections.abc import Iterator

import pytest

from cormorant_testing import fleets
from cormorant_testing.checked_loop import check_every_turn

check_every_turn()


@pytest.fixture(autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The engine that `fleets.make_fleet` uses; local, unless a test is marked to run on both."""
    name = getattr(request, "param", "local")
    if name.startswith("ray"):
        request.getfixturevalue("ray_cluster")
    fleets.ENGINE[0] = name
    yield name
    fleets.ENGINE[0] = "local"
