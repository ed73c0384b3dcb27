"""How pods end: why is told everywhere, a sidecar hides nothing, and what the job cannot help is not counted."""

from datetime import timedelta

from cormorant_operator.observed import Obstacle
from cormorant_operator.plan import CreatePod
from cormorant_testing.operator_world import World, of_kind, running, waiting


def test_head_that_is_blocked_is_tried_again_slowly_and_never_counted() -> None:
    words = "file:///data/run cannot be written: no permission to write in /data; choose another URI"
    world = waiting(runPolicy={"maxHeadRestarts": 0})
    for epoch in range(1, 5):
        world.finish(f"pong-head-{epoch}", exit_code=3, message=f'{{"frames": 1000, "reason": "{words}"}}')
        world.settle()
        assert world.condition("Ready") == "False/HeadBlocked"
        assert world.message("Ready") == f"pong-head-{epoch} ended last with exit code 3 (Error): {words}"
        assert (world.job.status.reason, world.job.status.head_restarts) == ("HeadBlocked", 0)
        assert world.job.status.recent_failures[-1].message == words
        assert (world.plan().due, of_kind(world.plan().actions, CreatePod)) == (world.now + timedelta(seconds=120), [])
        world.tick(120)
        world.settle()
        assert world.head.name == f"pong-head-{epoch + 1}"
        assert world.condition("Ready") == "False/HeadBlocked", "until a head works, it says why the last one did not"
    assert world.condition("Failed") == ""
    world.run()
    assert (world.condition("Ready"), world.job.status.reason) == ("True/EnoughWorkers", "")


def test_why_a_head_ended_is_told_everywhere() -> None:
    world = running()
    world.finish("pong-head-1", exit_code=1, message='{"frames": 1000, "reason": "the fleet lost its store"}')
    plan = world.step()
    assert plan.status is not None
    assert [note.message for note in plan.notes if note.reason == "PodFailed"] == [
        "pong-head-1: Error, exit code 1: the fleet lost its store"
    ]
    assert (plan.status.reason, plan.status.recent_failures[-1].message) == ("HeadFailed", "the fleet lost its store")
    assert world.message("Ready") == "pong-head-1 ended last with exit code 1 (Error): the fleet lost its store"


def test_reason_says_what_is_in_the_way_and_nothing_else() -> None:
    world = World()
    world.settle()
    assert world.job.status.reason == "", "it starts"
    world.place_all()
    world.block(world.live()[0].name, Obstacle.IMAGE_PULL, "image x: not found")
    world.settle()
    assert world.job.status.reason == "ImagePull"
    world.run()
    assert world.job.status.reason == ""
    world.say(world.head, is_queue_full=True)
    world.settle()
    assert world.job.status.reason == "WaitingForConsumer"
    world.finish("pong-head-1", exit_code=2, message='{"frames": 0, "reason": "no such policy"}')
    world.settle()
    assert world.job.status.reason == "HeadRefused"


def test_main_container_that_ends_beside_a_sidecar_is_replaced_and_its_pod_deleted() -> None:
    world = running()
    worker = world.live()[0].name
    world.finish(worker, has_sidecar=True)
    world.settle()
    assert (world.slots(), world.live()[0].failures) == (["cpu-0", "cpu-1"], 1)
    assert world.pods[worker].is_terminating
    world.finish("pong-head-1", has_sidecar=True)
    world.settle()
    assert (world.head.name, world.head.failures, world.job.status.head_restarts) == ("pong-head-2", 1, 1)
    assert world.pods["pong-head-1"].is_terminating
    world.tick(60)
    world.run()
    assert (sorted(pod.role for pod in world.pods.values()), world.job.status.head_restarts) == (
        ["head", "worker", "worker"],
        1,
    )


def test_head_that_is_done_beside_a_sidecar_completes_the_job_and_goes() -> None:
    world = running()
    world.finish("pong-head-1", exit_code=0, has_sidecar=True)
    world.settle()
    assert world.condition("Completed") == "True/AllFramesDelivered"
    assert all(pod.is_terminating for pod in world.pods.values())


def test_failed_head_with_a_sidecar_keeps_its_record_until_its_successor_is_there() -> None:
    world = running(runPolicy={"progressDeadlineSeconds": 0})
    for epoch in (1, 2):
        world.start(f"pong-head-{epoch}")
        world.finish(f"pong-head-{epoch}", has_sidecar=True)
        world.settle()
    assert world.plan().due == world.now + timedelta(seconds=10), "the back-off of a second failure"
    assert not world.pods["pong-head-2"].is_terminating
    world.tick(10)
    world.settle()
    assert (world.head.name, world.head.failures) == ("pong-head-3", 2)
    assert world.pods["pong-head-2"].is_terminating


def test_worker_that_its_kubelet_refuses_is_made_again_after_a_while_and_never_counted() -> None:
    world = waiting(runPolicy={"maxRestartsPerSlot": 0, "progressDeadlineSeconds": 0})
    world.evict(world.live()[0].name)
    world.settle()
    for _ in range(3):
        world.reject(world.live()[0].name)
        world.settle()
        assert len(world.live()) == 1
        due = world.plan().due
        assert due is not None
        world.tick((due - world.now).total_seconds())
        world.settle()
    assert (world.slots(), world.live()[0].failures) == (["cpu-0", "cpu-1"], 0)
    assert (world.condition("Failed"), world.job.status.groups[0].restarts) == ("", 0)
    assert world.job.status.recent_failures[-1].reason == "UnexpectedAdmissionError"
