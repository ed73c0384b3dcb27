"""Open files of a fleet's process: the limit is raised as far as it may be, and said where it may not."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.turn.life import raise_file_limit

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
SOFT = 512
"""Some machines and containers have a hard limit of 1,024."""


@pytest.fixture(autouse=True)
def _limits_as_before() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_soft_file_limit_is_raised_and_never_lowered() -> None:
    raise_file_limit(40, each=9)
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    assert raised[0] >= min(HARD if HARD != resource.RLIM_INFINITY else 1 << 62, 40 * 9 + 256 + num_open - 2)
    assert raised[1] == HARD
    raise_file_limit(10, each=9)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == raised


@pytest.mark.skipif(HARD == resource.RLIM_INFINITY, reason="this process may open any number of files")
def test_too_many_workers_for_the_hard_limit_are_refused() -> None:
    workers = HARD // 9 + 1
    words = rf"{workers} workers need {workers * 9 + 256:,} open files .* have {HARD:,} .* start {(HARD - 256) // 9:,} "
    with pytest.raises(FleetError, match=words):
        raise_file_limit(workers, each=9)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == SOFT
