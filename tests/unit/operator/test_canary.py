"""A new image is tried by a small pod before a working head goes: a tag that cannot be pulled costs nothing."""

from datetime import timedelta
from typing import Any

from cormorant_operator.decide.plan import CreatePod, DeletePod
from cormorant_operator.pods import Obstacle, Pod
from cormorant_testing.operator_world import World, of_kind, running


def changed(**spec: Any) -> World:
    """A job that collects, and whose manifest has just changed."""
    world = running(**spec)
    world.apply(image="example/cormorant:2")
    return world


def canary(world: World) -> Pod:
    (pod,) = [pod for pod in world.pods.values() if pod.role == "canary"]
    return pod


def deleted(world: World) -> set[str]:
    return {action.pod.role for action in of_kind(world.done, DeletePod)}


def test_image_that_cannot_be_pulled_costs_a_running_job_nothing() -> None:
    world = changed()
    before = {pod.uid for pod in world.pods.values() if pod.role != "canary"}
    world.block(canary(world).name, Obstacle.IMAGE_PULL, "image example/cormorant:2: not found")
    for frames in range(2000, 50_000, 2000):
        world.tick(550)
        world.then.collect(frames)
    assert world.condition("Accepted") == "False/ImagePull"
    assert world.message("Accepted").endswith("image example/cormorant:2: not found")
    assert (world.job.status.reason, world.condition("Updating")) == ("ImagePull", "True/TryingImage")
    assert (world.job.status.phase, world.told.count("ImagePull")) == ("Running", 1)
    assert {pod.uid for pod in world.pods.values() if pod.role != "canary"} == before
    # Whoever takes the mistake back has lost nothing.
    world.apply(image="example/cormorant:1")
    assert (world.condition("Accepted"), world.condition("Updating")) == ("True/Accepted", "False/UpToDate")
    live = {pod.uid for pod in world.pods.values() if not pod.is_terminating}
    assert (live, deleted(world)) == (before, {"canary"})


def test_head_goes_once_its_new_image_was_pulled() -> None:
    world = changed()
    assert deleted(world) == set()
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


def test_worker_that_dies_during_a_trial_keeps_the_old_image() -> None:
    world = changed()
    world.then.evict(world.live()[0].name)
    assert (len(world.live()), {pod.image for pod in world.live()}) == (2, {"example/cormorant:1"})


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


def test_canary_that_finds_no_node_fails_no_job() -> None:
    world = changed(runPolicy={"onUnschedulable": "Fail", "unschedulableAfterSeconds": 60})
    world.block(canary(world).name, Obstacle.UNSCHEDULABLE, "0/3 nodes are available")
    world.tick(100)
    world.then.collect(5000)
    assert (world.condition("Accepted"), world.condition("Failed")) == ("False/Unschedulable", "")
