"""How pods end: why is told everywhere, a sidecar hides nothing, and what the job cannot help is not counted."""

from datetime import timedelta
from typing import Any

import pytest

from cormorant_operator.decide.plan import CheckNode, CreatePod, Delete
from cormorant_operator.pods import NodeFact, Obstacle, Pod
from cormorant_testing.operator_world import World, of_kind, running, waiting


@pytest.mark.parametrize(("code", "wait_s"), [(3, 120), (4, 10)], ids=["blocked", "starved"])
def test_blocked_or_starved_head_is_retried_and_not_counted(code: int, wait_s: int) -> None:
    words = "file:///data/run cannot be written: no permission to write in /data; choose another URI"
    world = waiting(runPolicy={"maxHeadRestarts": 0})
    for epoch in range(1, 5):
        world.then.finish(f"pong-head-{epoch}", exit_code=code, message=f'{{"frames": 1000, "reason": "{words}"}}')
        assert world.condition("Ready") == "False/HeadBlocked"
        assert world.message("Ready") == f"pong-head-{epoch} exited with code {code} (Error): {words}"
        assert (world.job.status.reason, world.job.status.head_restarts) == ("HeadBlocked", 0)
        assert world.job.status.recent_failures[-1].message == words
        due = world.now + timedelta(seconds=wait_s)
        assert (world.plan().due, of_kind(world.plan().actions, CreatePod)) == (due, [])
        world.wait(wait_s)
        assert world.head.name == f"pong-head-{epoch + 1}"
        assert world.condition("Ready") == "False/HeadBlocked", "until a head works, it says why the last one did not"
    assert world.condition("Failed") == ""
    world.run()
    assert (world.condition("Ready"), world.job.status.reason) == ("True/EnoughWorkers", "")


@pytest.mark.parametrize(("replicas", "ready"), [(1, "False/WorkerFailed"), (2, "True/EnoughWorkers")])
def test_blocked_worker_says_why_everywhere_and_ends_nothing(replicas: int, ready: str) -> None:
    words = "device cuda was requested but torch finds no CUDA device; set its device: cpu"
    policy = {"maxRestartsPerSlot": 0, "progressDeadlineSeconds": 0}
    world = waiting(replicas=replicas, workerGroups=[{"name": "cpu", "minReplicas": 1}], runPolicy=policy)
    for attempt in range(3):
        name = world.live()[-1].name
        world.finish(name, exit_code=3, message=words)
        told = [note.message for note in world.step().events if note.reason == "PodFailed"]
        assert told == [f"{name}: Error, exit code 3: {words}"]
        world.settle()
        said = f"{replicas - 1} of {replicas} workers are ready; {name} exited with code 3 (Error): {words}"
        assert (world.condition("Ready"), world.message("Ready")) == (ready, said)
        last = world.job.status.recent_failures[-1]
        assert (last.pod, last.exit_code, last.message) == (name, 3, words)
        assert (world.plan().due, of_kind(world.plan().actions, CreatePod)) == (world.now + timedelta(seconds=120), [])
        world.wait(120)
        assert (world.live()[-1].attempt, world.live()[-1].failures) == (attempt + 1, 0)
        world.then.start_all()
    assert (world.condition("Failed"), world.message("Ready")) == ("", f"{replicas} of {replicas} workers are ready")
    assert (world.job.status.groups[0].restarts, world.job.status.head_restarts) == (0, 0)


def test_reason_says_what_is_in_the_way_and_nothing_else() -> None:
    world = World()
    world.settle()
    assert world.job.status.reason == "", "it starts"
    world.place_all()
    world.then.block(world.live()[0].name, Obstacle.IMAGE_PULL, "image x: not found")
    assert world.job.status.reason == "ImagePull"
    world.run()
    assert world.job.status.reason == ""
    world.then.say(world.head, is_queue_full=True)
    assert world.job.status.reason == "WaitingForConsumer"
    world.then.collect(1000)
    words = "environments keep failing: ...\nTraceback"
    world.then.say(world.head, is_queue_full=False, troubles={"EnvironmentsFailing": words})
    assert (world.condition("Progressing"), world.message("Progressing")) == ("True/EnvironmentsFailing", words)
    assert (world.job.status.reason, world.told.count("EnvironmentsFailing")) == ("EnvironmentsFailing", 1)
    world.then.say(world.head, troubles={})
    assert world.job.status.reason == ""
    world.then.finish("pong-head-1", exit_code=2, message='{"frames": 0, "reason": "cannot find my_pkg.envs"}')
    assert (world.condition("Failed"), world.job.status.reason) == ("True/HeadRefused", "HeadRefused")
    assert "cannot find my_pkg.envs" in world.message("Failed")


def test_head_without_the_earlier_weights_is_told_of_them_and_says_what_it_does() -> None:
    world = running()
    world.then.say(world.head, version=40)
    world.then.vanish("pong-head-1")
    head = [order.manifest for order in of_kind(world.done, CreatePod) if order.owner == "head"][-1]
    assert {"name": "CORMORANT_PUBLISHED_VERSION", "value": "40"} in head["spec"]["containers"][0]["env"]
    world.then.start_all()
    assert (world.known.answer.version, world.job.status.weights.version) == (0, 40), "it never goes back"
    world.then.say(world.head, troubles={"WeightsMissing": "waits for 40"}, is_leased=True, pause_state="paused")
    assert (world.condition("Paused"), world.message("Paused")) == ("True/API", "waits for 40")
    world.say(world.head, troubles={"WeightsMissing": "acts with version 0"}, is_leased=False, pause_state="running")
    world.tick(5)
    world.then.collect(2000)
    assert world.condition("Progressing") == "True/WeightsMissing"
    assert world.message("Progressing") == "acts with version 0"
    assert (world.job.status.reason, world.told.count("WeightsMissing")) == ("WeightsMissing", 1)


def test_evaluation_that_is_complete_counts_episodes() -> None:
    collection = {"framesPerBatch": 64, "episodes": {"count": 200}}
    output = {"dataset": {"uri": "file:///data/results"}}
    world = World(policy={"entrypoint": "cormorant.policies:mlp"}, collection=collection, output=output)
    world.run()
    world.then.finish("pong-head-1", exit_code=0)
    assert world.message("Completed") == "200 episodes were collected and delivered"


def test_head_that_ran_another_command_completes_nothing() -> None:
    world = running(runPolicy={"maxHeadRestarts": 0, "progressDeadlineSeconds": 0})
    world.then.collect(1000)
    world.then.finish("pong-head-1", exit_code=0, message="")
    assert (world.condition("Completed"), world.job.status.frames.settled) == ("", 1000)
    assert world.condition("Failed") == "True/HeadRestartsExceeded"
    assert "pong-head-1 exited with code 0 (Completed): it left no frame count" in world.message("Failed")


def test_worker_that_ends_beside_a_sidecar_is_replaced() -> None:
    world = running()
    worker = world.live()[0].name
    world.then.finish(worker, has_sidecar=True)
    assert (world.slots(), world.live()[0].failures) == (["cpu-0", "cpu-1"], 1)
    assert world.pods[worker].is_terminating


def test_failed_head_with_sidecar_stays_until_its_successor() -> None:
    world = running(runPolicy={"progressDeadlineSeconds": 0})
    for epoch in (1, 2):
        world.start(f"pong-head-{epoch}")
        world.then.finish(f"pong-head-{epoch}", has_sidecar=True)
    assert world.plan().due == world.now + timedelta(seconds=10), "the back-off of a second failure"
    assert not world.pods["pong-head-2"].is_terminating
    world.wait(10)
    assert (world.head.name, world.head.failures) == ("pong-head-3", 2)
    assert world.pods["pong-head-2"].is_terminating
    world.wait(60)
    assert (world.job.status.head_restarts, "pong-head-2" in world.pods) == (2, False)


def test_worker_rejected_by_kubelet_is_recreated_uncounted() -> None:
    world = waiting(runPolicy={"maxRestartsPerSlot": 0, "progressDeadlineSeconds": 0})
    world.then.evict(world.live()[0].name)
    for _ in range(3):
        world.then.reject(world.live()[0].name)
        assert len(world.live()) == 1
        world.wait((world.plan().due - world.now).total_seconds())
    assert (world.slots(), world.live()[0].failures) == (["cpu-0", "cpu-1"], 0)
    assert (world.condition("Failed"), world.job.status.groups[0].restarts) == ("", 0)
    assert world.job.status.recent_failures[-1].reason == "UnexpectedAdmissionError"


@pytest.mark.parametrize("is_lost", [False, True])
def test_head_evicted_by_a_taint_is_never_one_of_two(*, is_lost: bool) -> None:
    world = running()
    stale = NodeFact(is_lost=True, at=world.head.created - timedelta(seconds=1))
    world.known.nodes["node-of-pong-head-1"] = stale  # the node has returned since
    world.then.expel("pong-head-1")
    assert of_kind(world.done, CheckNode) == [CheckNode(name="node-of-pong-head-1")]
    if is_lost:  # a moment later
        world.lose_node("node-of-pong-head-1")
    world.wait(9)
    assert [pod.name for pod in world.pods.values() if pod.role == "head"] == ["pong-head-1"], "it may still write"
    world.wait(1)
    assert len(of_kind(world.done, CheckNode)) == 2, "it is looked at again, every ten seconds"
    if not is_lost:
        world.then.finish("pong-head-1", exit_code=143, message='{"frames": 1234}')
    assert (world.head.name, world.job.status.frames.collected) == ("pong-head-2", 1000 if is_lost else 1234)


def test_volume_on_a_lost_node_is_reported_and_waited_for() -> None:
    world = running(head={"persistence": {"claimName": "weights"}}, runPolicy={"startupDeadlineSeconds": 900})
    world.then.lose("pong-head-1")
    world.place("pong-head-2")
    world.wait(5000)
    assert (world.condition("Scheduled"), world.condition("Failed")) == ("False/VolumeOnLostNode", "")
    assert world.message("Scheduled").endswith(
        "kubectl taint node node-of-pong-head-1 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
    assert world.told.count("VolumeOnLostNode") == 1
    world.vanish("pong-head-1")  # Kubernetes deletes what is on a node that is out of service
    world.run()
    assert (world.condition("Scheduled"), world.condition("Failed")) == ("True/AllPodsScheduled", "")


def test_suspension_waits_for_tainted_but_not_lost_nodes() -> None:
    world = running(replicas=2)
    lost, tainted = (pod.name for pod in world.live())
    world.lose(lost)
    world.expel(tainted)
    world.apply(suspend=True)
    world.then.finish("pong-head-1", exit_code=143)
    assert world.condition("Suspended") == "False/Suspending"
    world.vanish(tainted)
    world.wait(60)
    assert (set(world.pods), world.condition("Suspended")) == ({lost}, "True/Suspended")


# -- a new image is tried by a small pod before a working head goes ----------------------------------------------


def changed(**spec: Any) -> World:
    """A job that collects, and whose manifest has just changed."""
    world = running(**spec)
    world.apply(image="example/cormorant:2")
    return world


def canary(world: World) -> Pod:
    (pod,) = [pod for pod in world.pods.values() if pod.role == "canary"]
    return pod


def deleted(world: World) -> set[str]:
    """Roles of deleted pods; of workers, their group."""
    return {action.name.split("-")[1] for action in of_kind(world.done, Delete) if action.kind == "Pod"}


@pytest.mark.parametrize(
    ("obstacle", "words"),
    [
        (Obstacle.IMAGE_PULL, "image example/cormorant:2: not found"),
        (Obstacle.UNSCHEDULABLE, "0/3 nodes are available"),
    ],
)
def test_image_that_cannot_be_pulled_costs_a_running_job_nothing(obstacle: Obstacle, words: str) -> None:
    world = changed(runPolicy={"onUnschedulable": "Fail", "unschedulableAfterSeconds": 60})
    before = {pod.uid for pod in world.pods.values() if pod.role != "canary"}
    world.block(canary(world).name, obstacle, words)
    for frames in range(2000, 50_000, 2000):
        world.tick(550)
        world.then.collect(frames)
    assert world.condition("Accepted") == f"False/{obstacle.value}"
    assert world.message("Accepted").endswith(words)
    assert (world.job.status.reason, world.condition("Updating")) == (obstacle.value, "True/TryingImage")
    assert (world.job.status.phase, world.told.count(obstacle.value)) == ("Running", 1)
    assert {pod.uid for pod in world.pods.values() if pod.role != "canary"} == before
    # Whoever takes the mistake back has lost nothing.
    world.apply(image="example/cormorant:1")
    assert (world.condition("Accepted"), world.condition("Updating")) == ("True/Accepted", "False/UpToDate")
    live = {pod.uid for pod in world.pods.values() if not pod.is_terminating}
    assert (live, deleted(world)) == (before, {"canary"})


def test_head_goes_once_its_new_image_was_pulled() -> None:
    world = changed()
    assert deleted(world) == set()
    world.then.evict(world.live()[0].name)
    assert [pod.image for pod in world.live()] == ["example/cormorant:1"] * 2
    (manifest,) = [a.manifest for a in of_kind(world.done, CreatePod) if a.owner == "canary"]
    (container,) = manifest["spec"]["containers"]
    assert (container["image"], container["command"]) == ("example/cormorant:2", ["python", "-c", ""])
    assert manifest["spec"]["restartPolicy"] == "Never"
    world.then.finish(canary(world).name, exit_code=0)
    assert deleted(world) >= {"head"}
    world.tick(60)
    world.run()
    assert (world.head.name, {pod.image for pod in world.pods.values()}) == ("pong-head-2", {"example/cormorant:2"})
    assert [pod.role for pod in world.pods.values() if pod.role == "canary"] == []
    assert (world.job.status.head_restarts, world.job.status.groups[0].restarts) == (0, 0)


def test_canary_that_never_ran_is_made_again() -> None:
    world = changed()
    first = canary(world)
    world.then.reject(first.name)
    assert (canary(world).uid, world.plan().due) == (first.uid, world.now + timedelta(seconds=30))
    world.wait(30)
    assert (canary(world).name, canary(world).uid != first.uid) == (first.name, True)
    assert deleted(world) == {"canary"}


def test_what_needs_no_trial_has_none() -> None:
    other = running()
    other.apply(head={"resources": {"requests": {"cpu": "2"}}})
    broken = World(image="example/typo:1")
    broken.settle()
    broken.place_all()
    broken.apply(image="example/cormorant:1")
    for world in (other, broken):
        assert "head" in deleted(world)
        assert [action.owner for action in of_kind(world.done, CreatePod)].count("canary") == 0


def test_suspension_and_the_end_of_a_job_take_the_canary_along() -> None:
    world = changed()
    world.apply(suspend=True)
    world.then.finish("pong-head-1", exit_code=143)
    world.wait(60)
    assert (world.pods, world.condition("Suspended")) == ({}, "True/Suspended")
    done = changed()
    done.then.finish("pong-head-1", exit_code=0)
    assert "canary" in deleted(done)
