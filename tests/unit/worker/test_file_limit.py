"""Open files of a fleet's process: the limit is raised as far as it may be, and said where it may not."""

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack
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
    # The tests before this one may have left more than 192 files open.
    assert 40 * 9 + 256 <= raised[0] <= 1024
    assert raised[1] == HARD
    raise_file_limit(10, each=9)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == raised


def test_program_with_many_open_files_keeps_its_share() -> None:
    with ExitStack() as stack:
        # The tests before this one may have left more than 250 files open, where the limit is 512.
        for _ in range(300 - sum(1 for _ in Path("/proc/self/fd").iterdir())):
            stack.enter_context(Path(os.devnull).open("rb"))
        raise_file_limit(50, each=9)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 250 + 50 * 9 + 64


@pytest.mark.skipif(HARD == resource.RLIM_INFINITY, reason="this process may open any number of files")
def test_too_many_workers_for_the_hard_limit_are_refused() -> None:
    workers = HARD // 9 + 1
    words = rf"{workers} workers need {workers * 9 + 256:,} open files .* have {HARD:,} .* start {(HARD - 256) // 9:,} "
    with pytest.raises(FleetError, match=words):
        raise_file_limit(workers, each=9)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == SOFT
