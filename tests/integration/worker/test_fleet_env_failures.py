"""A fleet whose environments fail: what ends it, what is tried again."""

import pytest

from cormorant_testing.collecting import make_job
from cormorant_worker.errors import EnvCrashed, WorkerFailed
from cormorant_worker.fleet.fleet import Fleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.worker.runtime import describe_failure


def test_environments_that_can_never_step_end_the_fleet_at_once() -> None:
    job = make_job(num_envs=2, failures=[{"step": 1, "words": "no display"}])
    with Fleet(job, FleetOptions(workers=1)) as fleet:
        with pytest.raises(WorkerFailed, match=r"raised ValueError: no display.*without completing a step") as caught:
            fleet.take(timeout_s=60)
        assert "\n" not in str(caught.value)
        assert fleet.stats().restarts == 0, "ten more workers would have failed in the same way"


@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_crash_is_final_where_no_environment_ever_stepped(has_stepped: bool) -> None:
    failed = describe_failure(EnvCrashed("environment 0 raised", has_stepped=has_stepped))
    assert (failed.is_final, failed.may_pass) == (not has_stepped, True)
    assert not describe_failure(RuntimeError("of the policy")).is_final


def test_crash_of_all_environments_is_not_final_after_frames(tmp_path) -> None:
    # The first worker collects 49 frames; then its environment fails in first steps, and so does the second worker's.
    failures = [
        {"step": 50, "flag": str(tmp_path / "first")},
        {"step": 1, "flag": str(tmp_path / "rest"), "skip": 1, "times": 7},
    ]
    job = make_job(num_envs=1, failures=failures, lengths=10, collection={"framesPerBatch": 10, "totalFrames": 200})
    with Fleet(job, FleetOptions(workers=1)) as fleet:
        assert sum(batch.numel() for batch in fleet.batches()) == 200
        assert fleet.stats().restarts == 2
