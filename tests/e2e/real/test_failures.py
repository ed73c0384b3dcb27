"""What fails around jobs whose pods run: containers, images, taints, drains, networks, the operator itself.

`steady` has sidecars and a learner in a pod of its own, which knows every frame by its number; `plain` tolerates every
taint. The tests share both, follow each other, and the last one counts.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from cormorant_testing.kubectl import LOCKED
from cormorant_testing.numbered import FRAMES, Learner, audited, manifest
from cormorant_testing.real_cluster import RELEASE, Installation
from cormorant_testing.real_job import Job, note, running

POLL_S, DEADLINE_S = 2, 15


def sidecar(name: str, image: str, **more: object) -> dict[str, Any]:
    """A container that runs until it is told to end, as a log shipper does."""
    return {
        "name": name,
        "image": image,
        "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1; done"],
        "resources": {"requests": {"cpu": "5m", "memory": "8Mi"}},
        "securityContext": LOCKED,
        **more,
    }


@dataclass(frozen=True, slots=True)
class Scene:
    steady: Job
    plain: Job
    learner: Learner
    node: str
    heads_lost: list[str]
    """Heads of `steady` that were killed: each may have lent a batch whose acknowledgement died with it."""

    def until_well(self) -> None:
        self.steady.until(
            lambda: (
                self.steady.condition("Ready") == "True/EnoughWorkers"
                and self.steady.condition("Progressing") == "True/FramesCollected"
            ),
            what="steady collects",
        )
        self.learner.wait_for(3)

    def num_heads(self) -> int:
        """Heads of `steady` whose own container has not ended."""
        pods = self.steady.namespace.items("pods", "cormorant.dev/collectorjob=steady,cormorant.dev/role=head")
        states = [s for pod in pods for s in pod["status"].get("containerStatuses", ()) if s["name"] == "head"]
        return sum("terminated" not in state["state"] for state in states)


@pytest.fixture(scope="module")
def scene(installed: Installation) -> Iterator[Scene]:
    namespace, image = installed.jobs, installed.images.job
    # Taints of the only node are for jobs.
    installed.upgrade(f"jobs.pollSeconds={POLL_S}", "tolerations[0].operator=Exists")
    sidecars = {
        # What a drain evicts comes back to the only node, as it would to another one.
        "tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}],
        "initContainers": [sidecar("mesh", image, restartPolicy="Always")],
        "containers": [sidecar("shipper", image)],
    }
    bearing = {"tolerations": [{"operator": "Exists"}]}
    steady = manifest("steady", {"spec": sidecars}, on_full="wait")
    plain = manifest("plain", {"spec": bearing}, on_full="drop_oldest")
    with audited(namespace, steady, image=image) as learner, running(namespace, plain) as other:
        other.until_ready()
        (node,) = {pod["spec"]["nodeName"] for pod in namespace.items("pods", "cormorant.dev/role=head")}
        made = Scene(learner.job, other, learner, node, heads_lost=[])
        made.until_well()
        yield made
    installed.upgrade()


def test_blocked_head_says_why_everywhere(scene: Scene, installed: Installation) -> None:
    mount = {"mountPath": "/var/lib/cormorant", "name": "state", "readOnly": True}
    document = manifest("blocked", {}, on_full="drop_oldest")
    document["spec"]["head"]["template"] = {"spec": {"containers": [{"name": "head", "volumeMounts": [mount]}]}}
    with running(installed.jobs, document) as job:
        job.until(lambda: job.condition("Ready") == "False/HeadBlocked", what="the head says that it is blocked")
        message = job.message("Ready")
        assert "/var/lib/cormorant" in message
        words = message[message.index("/var/lib/cormorant") :]
        header, row = job.namespace("get", "collectorjob", job.name).splitlines()
        assert row[header.index("REASON") :].split()[0] == "HeadBlocked"
        assert words in " ".join(job.namespace("describe", "collectorjob", job.name).split())
        doctor = installed.shell(f"cormorant doctor {job.name} || true")
        assert words in " ".join(doctor.split())
        assert words in job.namespace("get", "events", "-o", "json")
        assert job.status.get("headRestarts", 0) == 0
        note(f"a head on a read-only volume: {message}")


def test_head_that_ends_beside_sidecars_is_replaced(scene: Scene) -> None:
    job = scene.steady
    head, workers, epoch = job.head(), job.pods("worker"), job.status["epoch"]
    scene.heads_lost.append(head)
    killed = time.time()
    job.kill(head, "cormorant_api")
    job.until(lambda: job.status["epoch"] == epoch + 1, what="the next epoch")
    job.until(lambda: head not in job.namespace.names("pods"), what="the pod goes, and its sidecars with it")
    scene.until_well()
    assert job.pods("worker") == workers
    assert job.status["headRestarts"] == 1
    note(f"head killed beside two sidecars: a learner waited {scene.learner.gap_s(killed):.1f} s")


def test_unpullable_image_costs_a_running_job_nothing(scene: Scene, installed: Installation) -> None:
    job, pods, began = scene.steady, scene.steady.pods(), time.time()
    job.edit(image=f"{installed.images.job}-missing")
    job.until(lambda: job.condition("Accepted") == "False/ImagePull", what="the image is said to be missing")
    assert job.raw["status"]["reason"] == "ImagePull"
    scene.learner.wait_for(3)
    assert pods.items() <= job.pods().items()
    job.edit(image=None)
    job.until(lambda: job.pods() == pods and job.condition("Accepted") == "True/Accepted", what="the change is gone")
    scene.until_well()
    note(f"an image that cannot be pulled: a learner waited at most {scene.learner.gap_s(began):.1f} s for a batch")


@contextmanager
def tainted(scene: Scene, taint: str) -> Iterator[None]:
    kubectl = scene.steady.namespace
    kubectl("taint", "node", scene.node, taint)
    try:
        yield
    finally:
        kubectl("taint", "node", scene.node, f"{taint}-")


def test_tainted_node_never_has_two_heads(scene: Scene) -> None:
    job, epoch, others, began = scene.steady, scene.steady.status["epoch"], scene.plain.pods(), time.time()
    most_heads = 0

    def waits() -> bool:
        nonlocal most_heads
        most_heads = max(most_heads, scene.num_heads())
        return job.condition("Scheduled") == "False/Unschedulable" and job.status["epoch"] == epoch + 1

    with tainted(scene, "example.com/maintenance=now:NoExecute"):
        job.until(waits, what="the next head waits for a node")
        assert job.status["reason"] == "Unschedulable"
        assert scene.plain.pods() == others, "it tolerates the taint"
    scene.until_well()
    assert scene.num_heads() == 1
    assert most_heads <= 1
    assert job.status["headRestarts"] == 1, "only the one that was killed is counted"
    note(f"a NoExecute taint on the only node: a learner waited {scene.learner.gap_s(began):.1f} s")


def test_drain_takes_the_worker_and_waits_for_the_head(scene: Scene) -> None:
    job, epoch = scene.steady, scene.steady.status["epoch"]
    (worker,), head = job.pods("worker"), job.head()
    began = time.time()
    drain = subprocess.Popen(
        [
            *("kubectl", "drain", scene.node, "--delete-emptydir-data", "--timeout=120s"),
            *("--pod-selector", f"cormorant.dev/collectorjob={job.name}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        job.until(lambda: worker not in job.pods("worker") and job.pods("worker"), what="the worker is evicted")
        scene.until_well()
        worker_gap_s = scene.learner.gap_s(began)
        assert (drain.poll(), job.head()) == (None, head), "the drain waits, and the head collects"
        deleted = time.time()
        job.namespace("delete", "pod", head, "--wait=false")
        said, _ = drain.communicate(timeout=90)
        assert drain.returncode == 0, said
        assert "disruption budget" in said
        job.until(lambda: job.status["epoch"] == epoch + 1, what="the next epoch")
        scene.until_well()
    finally:
        drain.kill()
        drain.wait(timeout=10)
        job.namespace("uncordon", scene.node)
    last = scene.learner.seen()[-1]
    note(
        f"kubectl drain: a learner waited {worker_gap_s:.1f} s for a batch when the worker was evicted, and "
        f"{scene.learner.gap_s(deleted):.1f} s when the head was deleted; {last.duplicates} frames twice, "
        f"{last.missing} lost"
    )
    assert (last.duplicates, last.missing) == (0, 0)
    assert job.status["headRestarts"] == 1, "only the one that was killed is counted"


def events(job: Job) -> list[str]:
    return [event["reason"] for event in job.namespace.items("events") if event["involvedObject"]["name"] == job.name]


@contextmanager
def cut_off(pod_ip: str, other_ip: str) -> Iterator[None]:
    """Drop what a pod sends to another, as an egress policy does. Skips where its network is not this machine's."""
    networks = [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line]
    found = (name for name in networks if f" {pod_ip}/" in _run(["ip", "-netns", name, "-oneline", "address"]))
    if not (name := next(found, "")):
        pytest.skip(f"no network of this machine has the address {pod_ip}: the pod cannot be cut off from here")
    rule = ["OUTPUT", "--destination", other_ip, "--jump", "DROP"]
    inside = ["ip", "netns", "exec", name, "iptables"]
    _run([*inside, "--insert", *rule])
    try:
        yield
    finally:
        _run([*inside, "--delete", *rule])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"{error}: a pod cannot be cut off from here")
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def test_cut_off_operator_destroys_nothing(scene: Scene, installed: Installation) -> None:
    job = scene.steady
    # Times are short from here on, and frames come all the time.
    job.edit(runPolicy={"progressDeadlineSeconds": DEADLINE_S, "startupDeadlineSeconds": DEADLINE_S})
    job.until(lambda: job.status["observedGeneration"] == job.raw["metadata"]["generation"], what="it has read that")
    pods = job.pods()
    (operator,) = [
        p["status"]["podIP"] for p in installed.operators.items("pods") if "deletionTimestamp" not in p["metadata"]
    ]
    address = job.namespace.get("pod", job.head())["status"]["podIP"]
    with cut_off(operator, address):
        began = time.time()
        job.until(lambda: job.condition("Progressing") == "Unknown/ControlPlaneUnreachable", what="it is said")
        counted = job.frames()
        time.sleep(max(0.0, began + 2 * DEADLINE_S - time.time()))
        assert job.condition("Progressing") == "Unknown/ControlPlaneUnreachable"
        assert job.status["reason"] == "ControlPlaneUnreachable"
        assert "ControlPlaneUnreachable" in events(job)
        assert scene.plain.condition("Progressing") == "True/FramesCollected", "the other head is heard"
        scene.learner.wait_for(1)
    job.until(lambda: job.frames() > counted, what="the operator counts again")
    scene.until_well()
    assert job.pods() == pods
    assert "Stalled" not in events(job)
    assert job.condition("Failed") == ""


def test_head_deleted_without_an_operator_costs_no_acknowledged_frame(scene: Scene, installed: Installation) -> None:
    job, head = scene.steady, scene.steady.head()
    workers = set(job.pods("worker").items())
    # The next head has to start, which takes a busy machine longer than the tests before allow.
    job.edit(runPolicy={"startupDeadlineSeconds": 600})
    installed.operators("scale", f"deployment/{RELEASE}", "--replicas=0")
    try:
        installed.operators.until(lambda: not installed.operators.items("pods"), what="it is gone")
        counted = job.status["frames"]["settled"]
        scene.learner.wait_for(20)  # no status has them
        job.namespace("delete", "pod", head)
        taken = scene.learner.frames()
        assert taken >= counted + 20 * FRAMES
    finally:
        installed.operators("scale", f"deployment/{RELEASE}", "--replicas=1")
    installed.wait()
    job.until(lambda: job.status["epoch"] > 1 and job.status["frames"]["settled"] >= taken, what="all are counted")
    scene.until_well()
    assert set(job.pods("worker").items()) == workers
    assert job.condition("Failed") == ""
    note(f"head deleted without an operator: {taken - counted} frames acknowledged beyond the status, all counted")


def test_no_frame_was_lost_or_came_twice(scene: Scene) -> None:
    job, learner = scene.steady, scene.learner
    job.suspend()
    last, frames = learner.seen()[-1], job.status["frames"]
    note(f"the learner had {last.frames} frames, {frames['settled']} are settled; {last.missing} missing")
    assert (last.duplicates, last.missing) == (0, 0)
    assert frames["collected"] == frames["settled"]
    # A head that is killed may take the acknowledgement of the batch in hand along: that one is collected again.
    assert 0 <= last.frames - frames["settled"] <= len(scene.heads_lost) * FRAMES
