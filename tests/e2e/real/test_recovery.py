"""How long a learner waits for its first batch, and for the next one after each kind of loss: the tables of
docs/explanation/speed.md.

    CORMORANT_RECOVERY_ROUNDS=5 pytest tests/e2e/real/test_recovery.py -rP

prints it, with a timeline of each row's slowest round.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest

from cormorant_testing.numbered import CODE, audited, manifest
from cormorant_testing.real_cluster import Installation
from cormorant_testing.real_job import Job, note, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

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


@pytest.mark.parametrize("loss", LOSSES)
def test_learner_has_its_next_batch_soon_after(installed: Installation, loss: str) -> None:
    waits, slowest = list[float](), ""
    for _ in range(ROUNDS):
        # A job of its own: the second failure in a row waits for its backoff.
        with audited(installed.jobs, manifest("again", {}, on_full="wait"), image=installed.images.job) as learner:
            learner.wait_for(10)
            last, load, began = learner.seen()[-1], os.getloadavg()[0], time.time()
            began = LOSSES[loss](learner.job) or began
            first = learner.wait_for_next_head(last, within_s=LONGEST_S)
            waits.append(first.at - began)
            if waits[-1] == max(waits):
                said = timeline(learner.job, installed, began)
                slowest = f"load {load:.1f}\n{said}\n{first.at - began:6.1f} s  the first batch"
            learner.wait_for(3)
            seen = learner.seen()[-1]
            assert (seen.duplicates, seen.missing) == (0, 0)
    figures = f"{statistics.median(waits):.1f} s, {min(waits):.1f} to {max(waits):.1f}"
    note(f"| {loss} | {figures} ({len(waits)} rounds) |\n{slowest}")


def test_applied_job_has_its_first_batch_soon(installed: Installation) -> None:
    installed.jobs.apply_files("numbered", {"numbered.py": CODE})
    waits = list[float]()
    for _ in range(ROUNDS):
        began = time.time()
        with running(installed.jobs, manifest("first", {}, on_full="wait")) as job:
            job.take(within_s=LONGEST_S)
            waits.append(time.time() - began)
            said = timeline(job, installed, began)
    note(f"| applied | {statistics.median(waits):.1f} s, {min(waits):.1f} to {max(waits):.1f} |\n{said}")


def timeline(job: Job, installed: Installation, began: float) -> str:
    """What pods and the operator said since a moment, in seconds."""
    found: list[tuple[float, str]] = []
    for pod in job.namespace.items("pods", f"cormorant.dev/collectorjob={job.name}"):
        name, status = pod["metadata"]["name"], pod["status"]
        found.append((moment(pod["metadata"]["creationTimestamp"]), f"{name} created"))
        found += [(moment(c["lastTransitionTime"]), f"{name} {c['type']}") for c in status.get("conditions", ())]
        for container in status.get("containerStatuses", ()):
            for kind, state in container["state"].items():
                at = state.get("startedAt" if kind == "running" else "finishedAt")
                found += [(moment(at), f"{name} {container['name']} {kind}")] if at else []
        found += said(job.namespace("logs", name, check=False), name)
    found += said(installed.operators("logs", "deployment/cormorant", "--since=3m", check=False), "operator")
    return "\n".join(f"{at - began:6.1f} s  {what}" for at, what in sorted(found) if at >= began - 1)


def said(log: str, who: str) -> Iterator[tuple[float, str]]:
    for line in log.splitlines():
        if line.startswith("{"):
            event = json.loads(line)
            yield moment(event["timestamp"]), f"{who} said {event['event']} {event.get('seconds', '')}"


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
