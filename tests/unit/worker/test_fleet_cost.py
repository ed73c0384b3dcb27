"""What a fleet costs: answers, the same for any number of workers, and open files, whose limit is raised or said."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.head.instant import InstantEngine

from cormorant_testing.collecting import make_job
from cormorant_testing.cost import lines_run
from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.turn.life import raise_file_limit
from cormorant_worker.local_fleet import LocalFleet


@pytest.mark.parametrize("has_dataset", [False, True])
def test_one_number_costs_the_same_for_any_number_of_workers(tmp_path: Path, has_dataset: bool) -> None:
    def costs(workers: int) -> list[int]:
        uri = str(tmp_path / str(workers)) if has_dataset else ""
        job = make_job(num_envs=1, queue={"capacityBatches": 8}, dataset=uri, collection={"framesPerBatch": 1})
        with WorkerFleet(job, FleetOptions(workers=workers), engine=InstantEngine()) as fleet:
            reader = LocalFleet(fleet)
            for _ in range(20):
                assert reader.next_batch(timeout=30) is not None
            fleet.pause()
            for _ in range(4):  # each reads some heartbeats
                fleet.stats(workers=False)
            handles = tuple(fleet._core.slots.workers)
            stats = fleet.stats(workers=False)
            assert stats.undurable_frames == has_dataset * sum(handle.landed_frames for handle in handles)
            calls = (lambda: fleet.version, lambda: fleet.stats(workers=False))
            return [lines_run(call) for call in calls]

    assert costs(600) == costs(300)


HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
SOFT = 512
"""Some machines and containers have a hard limit of 1,024."""


@pytest.fixture
def low_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("low_limit")
def test_soft_file_limit_is_raised_and_never_lowered() -> None:
    raise_file_limit(40, each=9)
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    assert raised[0] >= min(HARD if HARD != resource.RLIM_INFINITY else 1 << 62, 40 * 9 + 256 + num_open - 2)
    assert raised[1] == HARD
    raise_file_limit(10, each=9)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == raised


@pytest.mark.usefixtures("low_limit")
@pytest.mark.skipif(HARD == resource.RLIM_INFINITY, reason="this process may open any number of files")
def test_too_many_workers_for_the_hard_limit_are_refused() -> None:
    workers = HARD // 9 + 1
    words = rf"{workers} workers need {workers * 9 + 256:,} open files .* have {HARD:,} .* start {(HARD - 256) // 9:,} "
    with pytest.raises(FleetError, match=words):
        raise_file_limit(workers, each=9)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == SOFT
