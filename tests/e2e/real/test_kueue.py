"""A job that Kueue evicts for another one and admits again, with a learner that audits every frame."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from cormorant_testing.numbered import FRAMES, audited, manifest
from cormorant_testing.real_cluster import Installation
from cormorant_testing.real_job import note, running
from cormorant_testing.real_kueue import KueueProcess, Quota, skip_without_kueue

ONE_JOB = "150m"
"""Room for one head and one worker, which request 50m each."""


@pytest.fixture
def quota(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quota]:
    skip_without_kueue()
    installed.release.upgrade("jobs.kueue=true", chart=installed.chart)
    installed.wait()
    with KueueProcess(tmp_path_factory.mktemp("kueue")) as kueue:
        quota = Quota(installed.jobs, cpu=ONE_JOB, node_labels={"kubernetes.io/os": "linux"})
        kueue.wait_until_it_queues(installed.jobs)
        yield quota
        quota.close()


def queued(name: str, quota: Quota, priority: str) -> dict[str, Any]:
    document = manifest(name, {}, on_full="wait")
    document["metadata"]["labels"] = quota.labels(priority)
    return document


def test_evicted_job_comes_back_and_no_frame_is_lost(installed: Installation, quota: Quota) -> None:
    with audited(installed.jobs, queued("patient", quota, "low"), image=installed.images.job) as learner:
        job = learner.job
        learner.wait_for(10)
        last = learner.seen()[-1]
        with running(installed.jobs, queued("urgent", quota, "high")) as urgent:
            evicted_s = job.until(lambda: job.condition("Suspended") == "False/Evicted", what="it is evicted")
            ready_s = urgent.until_ready()
            assert (job.pods(), job.condition("Scheduled")) == ({}, "False/WaitingForQuota")
            # The learner took what the evicted head still had: nothing is left to collect again.
            assert learner.frames() == job.status["frames"]["settled"] > last.frames
        released = time.time()
        first = learner.wait_for_next_head(last, within_s=180)
        learner.wait_for(10)
        job.suspend()
        seen = learner.seen()[-1]
        assert (seen.duplicates, seen.missing) == (0, 0)
        assert seen.frames == job.status["frames"]["settled"] >= last.frames + 10 * FRAMES
        assert job.status["headRestarts"] == 0
        note(f"evicted after {evicted_s:.1f} s, the other job ready {ready_s:.1f} s later")
        note(f"a batch of the next head {first.at - released:.1f} s after the other job was deleted")
