"""How long a learner waits for its first batch, and for the next one after each kind of loss: the tables of
docs/explanation/speed.md.

    CORMORANT_RECOVERY_ROUNDS=5 pytest tests/e2e/real/test_recovery.py -rP

prints them.
"""

import os
import statistics
import time
from collections.abc import Callable

import pytest

from cormorant_testing.numbered import CODE, audited, manifest
from cormorant_testing.real_cluster import Installation
from cormorant_testing.real_job import Job, note, running

ROUNDS = int(os.environ.get("CORMORANT_RECOVERY_ROUNDS", "1"))
LONGEST_S = 90.0
"""On a machine that is busy besides; an idle one needs a tenth."""


def suspend_and_resume(job: Job) -> float:
    job.suspend()
    resumed = time.time()
    job.edit(suspend=False)
    return resumed


def delete(job: Job, *roles: str) -> None:
    names = [name for role in roles for name in job.pods(role)]
    job.namespace("delete", "pod", *names, "--wait=false")


LOSSES: dict[str, Callable[[Job], float | None]] = {
    "the head's process is killed": lambda job: job.kill(job.head(), "cormorant_api"),
    "Ray's head (the GCS) is killed": lambda job: job.kill(job.head(), "gcs_server"),
    "the head's pod is deleted": lambda job: delete(job, "head"),
    "every pod is deleted": lambda job: delete(job, "head", "worker"),
    "suspended; from the resumption": suspend_and_resume,
}


def tell(what: str, waits: list[float]) -> None:
    figures = f"{statistics.median(waits):.1f} s, {min(waits):.1f} to {max(waits):.1f}"
    note(f"| {what} | {figures} ({len(waits)} rounds) |")


@pytest.mark.parametrize("loss", LOSSES)
def test_learner_has_its_next_batch_soon_after(installed: Installation, loss: str) -> None:
    waits = list[float]()
    for _ in range(ROUNDS):
        # A job of its own: the second failure in a row waits for its backoff.
        with audited(installed.jobs, manifest("again", {}, on_full="wait"), image=installed.images.job) as learner:
            learner.wait_for(10)
            last, began = learner.seen()[-1], time.time()
            began = LOSSES[loss](learner.job) or began
            waits.append(learner.wait_for_next_head(last, within_s=LONGEST_S).at - began)
            learner.wait_for(3)
            seen = learner.seen()[-1]
            assert (seen.duplicates, seen.missing) == (0, 0)
    tell(loss, waits)


def test_applied_job_has_its_first_batch_soon(installed: Installation) -> None:
    installed.jobs.apply_files("numbered", {"numbered.py": CODE})
    waits = list[float]()
    for _ in range(ROUNDS):
        began = time.time()
        with running(installed.jobs, manifest("first", {}, on_full="wait")) as job:
            job.take(within_s=LONGEST_S)
            waits.append(time.time() - began)
    tell("applied", waits)
