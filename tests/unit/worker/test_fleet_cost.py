"""What a fleet's answers cost: the same for any number of workers."""

from pathlib import Path

import pytest
from benchmarks.head.instant import InstantEngine

from cormorant_testing.collecting import make_job
from cormorant_testing.cost import lines_run
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
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
