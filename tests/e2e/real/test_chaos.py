"""Random losses on a node, absences of the operator among them, and a learner that audits every frame.

    CORMORANT_CHAOS_MINUTES=60 pytest tests/e2e/real/test_chaos.py -rP

prints what happened how often, and the account at the end. CORMORANT_CHAOS_SEED draws the same events again.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from math import inf

import pytest

from cormorant_testing.numbered import FRAMES, Learner, audited, manifest
from cormorant_testing.real_cluster import RELEASE, Installation
from cormorant_testing.real_job import Job, note

MINUTES = float(os.environ.get("CORMORANT_CHAOS_MINUTES", "3"))
SEED = int(os.environ.get("CORMORANT_CHAOS_SEED", "1"))
COUNTED = {
    "the head's process is killed": "head",
    "Ray's head is killed": "head",
    "a worker is killed": "worker",
    "a worker's raylet is killed": "worker",
}
"""Failures of a pod's own, by role: their backoff grows to minutes, so a role has one in ten minutes."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * MINUTES + 1800)]


class Chaos:
    def __init__(self, learner: Learner, installation: Installation) -> None:
        self.job, self.learner, self.installation = learner.job, learner, installation
        self.random = random.Random(SEED)
        self.happened: Counter[str] = Counter()
        self.counted: dict[str, float] = {}
        self.heads_lost = 0
        """Each may have taken the acknowledgement of one batch along."""
        self.beyond, self.since_well = 0, list[str]()
        self.losses: dict[str, Callable[[], object]] = {
            "the head's process is killed": lambda: self.lose_head(lambda head: self.job.kill(head, "cormorant_api")),
            "Ray's head is killed": lambda: self.lose_head(lambda head: self.job.kill(head, "gcs_server")),
            "the head's pod is deleted": lambda: self.lose_head(self.delete),
            "the head's pod is deleted by force": lambda: self.lose_head(lambda head: self.delete(head, "--now")),
            "every pod is deleted": lambda: self.lose_head(lambda head: self.delete(head, *self.job.pods("worker"))),
            "a worker's pod is deleted": lambda: self.delete(self.worker()),
            "a worker is killed": lambda: self.job.kill(self.worker(), "ray::WorkerActor"),
            "a worker's raylet is killed": lambda: self.job.kill(self.worker(), "raylet"),
            "the head gets no CPU time": lambda: self.freeze(self.job.head(), "cormorant_api", "raylet"),
            "a worker gets no CPU time": lambda: self.freeze(self.worker(), "raylet", "ray::WorkerActor"),
            "suspended and resumed": lambda: (
                self.job.edit(suspend=True),
                self.nap(1, 15),
                self.job.edit(suspend=False),
            ),
            "another number of workers": lambda: self.job.edit(replicas=self.random.choice((1, 2, 3))),
            "the operator's pod is deleted": lambda: self.installation.operators("delete", "pods", "--all", "--now"),
        }

    def run(self) -> None:
        until = time.monotonic() + 60 * MINUTES
        while time.monotonic() < until:
            if self.random.random() < 0.25:
                self.without_an_operator()
            else:
                self.lose_something()
            if self.random.random() < 0.5:  # else the next loss meets a job that is not well
                self.until_well()
            self.nap(1, 10)
        self.until_well()

    def without_an_operator(self) -> None:
        """Things go on to happen meanwhile."""
        operators, deployment = self.installation.operators, f"deployment/{RELEASE}"
        operators("scale", deployment, "--replicas=0")
        self.since_well.append("no operator")
        for _ in range(self.random.randint(0, 2)):
            self.nap(0, 20)
            self.lose_something()
        self.nap(0, 20)
        operators("scale", deployment, "--replicas=1")
        self.since_well.append("an operator")
        self.happened["the operator is away for up to a minute"] += 1

    def lose_something(self) -> None:
        what = self.random.choice(sorted(self.losses))
        if (role := COUNTED.get(what)) and self.counted.get(role, -inf) > time.monotonic() - 600:
            return
        # What is lost already cannot be lost again.
        with suppress(AssertionError, ValueError, IndexError):
            self.losses[what]()
            self.happened[what] += 1
            self.since_well.append(what)
            if role:
                self.counted[role] = time.monotonic()

    def lose_head(self, lose: Callable[[str], object]) -> None:
        head = self.job.head()
        self.heads_lost += 1
        lose(head)

    def freeze(self, pod: str, *words: str) -> None:
        try:
            for word in words:
                self.job.signal(pod, word, signal.SIGSTOP)
            self.nap(3, 18)
        finally:
            for word in words:
                with suppress(AssertionError):  # one of them has not started yet, or has ended
                    self.job.signal(pod, word, signal.SIGCONT)

    def delete(self, *pods: str) -> None:
        self.job.namespace("delete", "pod", *pods, "--wait=false")

    def worker(self) -> str:
        return self.random.choice(sorted(self.job.pods("worker")))

    def nap(self, low_s: float, high_s: float) -> None:
        time.sleep(self.random.uniform(low_s, high_s))

    def until_well(self) -> None:
        self.installation.wait()
        within_s = 360 + 240  # the longest backoff of a head that ended by itself, and its start
        self.job.until_ready(within_s=within_s)
        self.learner.wait_for(3, within_s=within_s)  # what was ready may have been lost just before
        self.tell_what_was_collected_again()

    def tell_what_was_collected_again(self) -> None:
        settled = self.job.ask("/v1/status").json["frames"]["settled"]
        beyond, before = self.learner.frames() - settled, self.beyond
        if abs(beyond - before) > 10 * FRAMES:  # the learner has gone on since the head answered
            note(f"about {beyond - before:,} frames beyond the account after: {', '.join(self.since_well)}")
            self.beyond = beyond
        self.since_well.clear()


def account(job: Job, learner: Learner, chaos: Chaos) -> None:
    job.suspend()
    last, settled = learner.seen()[-1], job.status["frames"]["settled"]
    rows = "\n".join(f"| {what} | {times} |" for what, times in sorted(chaos.happened.items()))
    note(f"{MINUTES:g} minutes, seed {SEED}, {job.status['epoch']} heads\n{rows}")
    note(
        f"{last.frames:,} frames at the learner: {last.duplicates} twice, {last.missing} missing; {settled:,} settled: "
        f"{last.frames - settled} collected beyond the account, {chaos.heads_lost} heads lost"
    )
    assert (last.duplicates, last.missing) == (0, 0)
    assert 0 <= last.frames - settled <= chaos.heads_lost * FRAMES


def test_no_frame_is_lost_or_comes_twice_in_chaos(installed: Installation) -> None:
    document = manifest("chaos", {}, on_full="wait", workers=2)
    document["spec"]["runPolicy"] = {"maxHeadRestarts": 1000, "maxRestartsPerSlot": 1000}
    with audited(installed.jobs, document, image=installed.images.job) as learner:
        chaos = Chaos(learner, installed)
        chaos.run()
        account(learner.job, learner, chaos)
        assert learner.job.condition("Failed") == ""
        log = learner.job.namespace("logs", learner.pod)
        assert "Traceback" not in log
