"""How a learner fares when a job loses pods or its quota: how long it waits for its next batch, as in the tables of
docs/explanation/speed.md, and that no frame is lost, comes twice or is too old, in any order of random losses.

    CORMORANT_RECOVERY_ROUNDS=5 pytest tests/e2e/real/test_recovery.py -k soon -rP   # prints the tables
    CORMORANT_CHAOS_MINUTES=60 pytest tests/e2e/real/test_recovery.py -k chaos -rP

The second prints what happened how often, and the account at the end. CORMORANT_CHAOS_SEED draws the same events again.
And a Ray cluster in pods, as KubeRay makes it: plain `ray start`, workers come and go, and our fleet is the driver.
"""

import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from typing import Any

import pytest
import yaml

from cormorant_testing.kubectl import Namespace, restricted_pod
from cormorant_testing.numbered import CODE, FRAMES, Learner, audited, manifest
from cormorant_testing.real_cluster import RELEASE, Installation
from cormorant_testing.real_job import SMALL, Job, learning, note, running, small_job
from cormorant_testing.real_kueue import KueueProcess, Quota, skip_without_kueue
from cormorant_testing.scripts import until

ROUNDS = int(os.environ.get("CORMORANT_RECOVERY_ROUNDS", "1"))
LONGEST_S = 90.0
"""On a machine that is busy besides; an idle one needs a tenth."""


def delete(job: Job, *pods: str, now: bool = False) -> None:
    job.namespace("delete", "pod", *pods, "--wait=false", *(["--now"] if now else []))


def suspend_and_resume(job: Job) -> float:
    job.suspend()
    resumed = time.time()
    job.edit(suspend=False)
    return resumed


HEAD_LOSSES: dict[str, Callable[[Job], None]] = {
    "the head's process is killed": lambda job: job.kill(job.head(), "cormorant_api"),
    "Ray's head (the GCS) is killed": lambda job: job.kill(job.head(), "gcs_server"),
    "the head's pod is deleted": lambda job: delete(job, job.head()),
    "every pod is deleted": lambda job: delete(job, job.head(), *job.pods("worker")),
}
LOSSES: dict[str, Callable[[Job], float | None]] = {
    **HEAD_LOSSES, "suspended; from the resumption": suspend_and_resume
}  # fmt: skip
"""Those that do not begin at once return when they do."""


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


LEARNER = """
import json

from cormorant import LearnerLink, connect
from cormorant.policies import mlp

with connect() as client:
    policy = mlp(*client.spaces)
    link = LearnerLink(client, policy, wait=60)
    for batch in link.batches():
        acted = batch["collector", "policy_version"]
        said = {"oldest": int(acted.min()), "newest": int(acted.max()), "published": link.version}
        print(json.dumps(said | {"staleness": link.staleness.max}), flush=True)
        link.step()
"""
ON_POLICY = small_job(
    "onpolicy",
    {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4}},
    policy="cormorant.policies:mlp",
    workers=2,
    collection={"mode": "sync", "framesPerBatch": 64, "weights": {"maxStaleness": 0}},
    output={"queue": {"capacityBatches": 1}},
)


def test_no_batch_is_older_than_what_its_learner_published(installed: Installation) -> None:
    namespace = installed.jobs
    namespace.apply_files("onpolicy", {"learner.py": LEARNER})
    command = ("python", "-u", "/code/learner.py")
    with running(namespace, ON_POLICY) as job:
        job.until_ready()
        with learning(job, *command, image=installed.images.job, code="onpolicy") as pod:
            for what in ("", "the head's process is killed", "the head's pod is deleted", "every pod is deleted"):
                if what:
                    HEAD_LOSSES[what](job)
                known = len(job.said_by(pod))
                job.until(
                    lambda least=known + 20: len(job.said_by(pod)) >= least,
                    what=f"20 batches more; before: {what}",
                    within_s=180,
                )
            said = job.said_by(pod)
    stale = [(number, batch) for number, batch in enumerate(said) if batch["oldest"] < batch["published"]]
    assert stale == []
    assert max(batch["staleness"] for batch in said) == 0
    published = [batch["published"] for batch in said]
    assert published == sorted(set(published)), "a version was given twice"


# -- Kueue -----------------------------------------------------------------------------------------------------

ONE_JOB = "150m"
"""Room for one head and one worker, which request 50m each."""


@pytest.fixture
def quota(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quota]:
    skip_without_kueue()
    installed.upgrade("jobs.kueue=true")
    with KueueProcess(tmp_path_factory.mktemp("kueue")) as kueue:
        quota = Quota(installed.jobs, cpu=ONE_JOB, node_labels={"kubernetes.io/os": "linux"})
        kueue.wait_until_it_queues(installed.jobs)
        yield quota
        quota.close()
    installed.upgrade()


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


# -- chaos -----------------------------------------------------------------------------------------------------

MINUTES = float(os.environ.get("CORMORANT_CHAOS_MINUTES", "3"))
SEED = int(os.environ.get("CORMORANT_CHAOS_SEED", "1"))
COUNTED = {
    "the head's process is killed": "head",
    "Ray's head (the GCS) is killed": "head",
    "a worker is killed": "worker",
    "a worker's raylet is killed": "worker",
}
"""Failures of a pod's own, by role: their backoff grows to minutes, so a role has one in ten minutes."""


class Chaos:
    """Absences of the operator are among the losses."""

    def __init__(self, learner: Learner, installation: Installation) -> None:
        self.job, self.learner, self.installation = learner.job, learner, installation
        job = self.job
        self.random = random.Random(SEED)
        self.happened: Counter[str] = Counter()
        self.counted: dict[str, float] = {}
        self.heads_lost = 0
        """Each may have taken the acknowledgement of one batch along."""
        by_force = {"the head's pod is deleted by force": lambda job: delete(job, job.head(), now=True)}
        self.head_losses: dict[str, Callable[[Job], None]] = HEAD_LOSSES | by_force
        self.losses: dict[str, Callable[[], object]] = {
            "a worker's pod is deleted": lambda: delete(job, self.worker()),
            "a worker is killed": lambda: job.kill(self.worker(), "ray::WorkerActor"),
            "a worker's raylet is killed": lambda: job.kill(self.worker(), "raylet"),
            "the head gets no CPU time": lambda: self.freeze(job.head(), "cormorant_api", "raylet"),
            "a worker gets no CPU time": lambda: self.freeze(self.worker(), "raylet", "ray::WorkerActor"),
            "suspended and resumed": lambda: (job.edit(suspend=True), self.nap(1, 15), job.edit(suspend=False)),
            "another number of workers": lambda: job.edit(replicas=self.random.choice((1, 2, 3))),
            "the operator's pod is deleted": lambda: installation.operators("delete", "pods", "--all", "--now"),
        }

    def run(self) -> None:
        deadline = time.monotonic() + 60 * MINUTES
        while time.monotonic() < deadline:
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
        for _ in range(self.random.randint(0, 2)):
            self.nap(0, 20)
            self.lose_something()
        self.nap(0, 20)
        operators("scale", deployment, "--replicas=1")
        self.happened["the operator is away for up to a minute"] += 1

    def lose_something(self) -> None:
        what = self.random.choice(sorted(self.head_losses | self.losses))
        if (role := COUNTED.get(what)) and self.counted.get(role, -inf) > time.monotonic() - 600:
            return
        # What is lost already cannot be lost again.
        with suppress(AssertionError, ValueError, IndexError):
            if lose := self.head_losses.get(what):
                self.job.head()
                self.heads_lost += 1
                lose(self.job)
            else:
                self.losses[what]()
            self.happened[what] += 1
            if role:
                self.counted[role] = time.monotonic()

    def freeze(self, pod: str, *words: str) -> None:
        try:
            for word in words:
                self.job.signal(pod, word, signal.SIGSTOP)
            self.nap(3, 18)
        finally:
            for word in words:
                with suppress(AssertionError):  # one of them has not started yet, or has ended
                    self.job.signal(pod, word, signal.SIGCONT)

    def worker(self) -> str:
        return self.random.choice(sorted(self.job.pods("worker")))

    def nap(self, low_s: float, high_s: float) -> None:
        time.sleep(self.random.uniform(low_s, high_s))

    def until_well(self) -> None:
        self.installation.wait()
        within_s = 360 + 240  # the longest backoff of a head that ended by itself, and its start
        self.job.until_ready(within_s=within_s)
        self.learner.wait_for(3, within_s=within_s)  # what was ready may have been lost just before


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 1800)
def test_no_frame_is_lost_or_comes_twice_in_chaos(installed: Installation) -> None:
    document = manifest("chaos", {}, on_full="wait", workers=2)
    document["spec"]["runPolicy"] = {"maxHeadRestarts": 1000, "maxRestartsPerSlot": 1000}
    with audited(installed.jobs, document, image=installed.images.job) as learner:
        chaos, job = Chaos(learner, installed), learner.job
        chaos.run()
        job.suspend()
        last, settled = learner.seen()[-1], job.status["frames"]["settled"]
        rows = "\n".join(f"| {what} | {times} |" for what, times in sorted(chaos.happened.items()))
        note(f"{MINUTES:g} minutes, seed {SEED}, {job.status['epoch']} heads\n{rows}")
        note(
            f"{last.frames:,} frames at the learner: {last.duplicates} twice, {last.missing} missing; {settled:,} "
            f"settled: {last.frames - settled} collected beyond the account, {chaos.heads_lost} heads lost"
        )
        assert (last.duplicates, last.missing) == (0, 0)
        assert 0 <= last.frames - settled <= chaos.heads_lost * FRAMES
        assert job.condition("Failed") == ""
        assert "Traceback" not in job.namespace("logs", learner.pod)


# -- a Ray cluster -----------------------------------------------------------------------------------------------

TOTAL = 60 * FRAMES
DRIVER = f"""
import json
import time

from cormorant import RayOptions, open_fleet

with open_fleet("/code/job.yaml", engine=RayOptions(address="auto")) as fleet:
    frames = 0
    for batch in fleet.batches():
        frames += batch.numel()
        print(json.dumps({{"at": time.time(), "frames": frames}}), flush=True)
        if frames >= {TOTAL}:
            break
"""
START = "ray start --block --disable-usage-stats --node-ip-address=$POD_IP --object-store-memory=104857600"
ROLES = {
    "head": f"{START} --head --port=6379 --num-cpus=0 --include-dashboard=false",
    "worker": f"{START} --address=ray-head:6379 --num-cpus=1",
}


def pod(name: str, role: str, image: str) -> Any:
    """A node of the cluster, as KubeRay starts it from a RayCluster's group."""
    container = {
        "name": "ray",
        "image": image,
        "command": ["bash", "-c", ROLES[role]],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_AUTH_TOKEN", "value": "f" * 32},
            {"name": "HOME", "value": "/tmp"},
            {"name": "PYTHONPATH", "value": "/code"},
        ],
        "resources": SMALL,
        "volumeMounts": [{"name": "code", "mountPath": "/code"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "code", "configMap": {"name": "driver"}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return restricted_pod(name, container, labels={"ray": role}, terminationGracePeriodSeconds=1, volumes=volumes)


@pytest.fixture
def cluster(installed: Installation) -> Iterator[Namespace]:
    kubectl = installed.jobs
    job = manifest("numbered", {}, on_full="wait", workers=2)
    # Its code is a ConfigMap of the cluster's pods, as any image's.
    del job["spec"]["code"]
    kubectl.apply_files("driver", {"numbered.py": CODE, "driver.py": DRIVER, "job.yaml": yaml.safe_dump(job)})
    service = {"selector": {"ray": "head"}, "ports": [{"port": 6379}]}
    made = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "ray-head"}, "spec": service},
        pod("ray-head-0", "head", installed.images.job),
        pod("ray-worker-0", "worker", installed.images.job),
        pod("ray-worker-1", "worker", installed.images.job),
    ]
    for document in made:
        kubectl("apply", "-f", "-", document=document)
    yield kubectl
    for kind, name in (("service", "ray-head"), ("configmap", "driver")):
        kubectl("delete", kind, name, "--wait=false", check=False)
    kubectl("delete", "pods", "-l", "ray", "--wait=false", check=False)


def test_fleet_on_an_existing_ray_cluster_outlives_its_workers(cluster: Namespace, installed: Installation) -> None:
    kubectl = cluster

    def log() -> str:
        return kubectl("exec", "ray-head-0", "--", "cat", "/tmp/driver.log", check=False)

    def frames() -> int:
        lines = [line for line in log().splitlines() if line.startswith('{"at"')]
        return int(json.loads(lines[-1])["frames"]) if lines else 0

    def has_answered() -> bool:
        return (
            kubectl.run("exec", "ray-head-0", "--", "ray", "health-check", "--address", "ray-head:6379").returncode == 0
        )

    until(has_answered, seconds=180, what="Ray's head answers")
    # A RayJob's entrypoint runs on the head's node, like this.
    kubectl("exec", "ray-head-0", "--", "bash", "-c", "nohup python /code/driver.py > /tmp/driver.log 2>&1 &")
    try:
        until(lambda: frames() > 5 * FRAMES, seconds=240, what="frames come")
        kubectl("delete", "pod", "ray-worker-0", "--now", "--wait=false")
        lost = time.monotonic()
        kubectl("apply", "-f", "-", document=pod("ray-worker-2", "worker", installed.images.job))
        before = frames()
        until(lambda: frames() > before + 10 * FRAMES, seconds=240, what="frames come without that worker")
        note(f"a worker's node went and another came: 10 batches after {time.monotonic() - lost:.1f} s")
        until(lambda: frames() >= TOTAL, seconds=240, what="all frames are there")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log()[-4000:]}") from None
