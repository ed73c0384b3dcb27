"""One head over a real fleet for all tests of a module."""

from collections.abc import Iterator

import pytest

from cormorant_testing.collecting import make_job
from cormorant_testing.serving import Served, serve


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A job without an end, over weights that name their version in every action."""
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=(3, 8), step_s=0.001)
    with serve(job, directory=tmp_path_factory.mktemp("head"), workers=2, ack_within_s=1.0) as served:
        yield served
