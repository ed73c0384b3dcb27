"""No room, a silent head, and others who change what is ours: the rest of the table."""

from datetime import timedelta
from typing import Any

import pytest

from cormorant_operator.decide.plan import CheckTemplate, CreatePod, CreateTokens, Delete
from cormorant_operator.pods import Obstacle
from cormorant_testing.operator_world import World, changes, of_kind, running, waiting

# -- room ------------------------------------------------------------------------------------------------------


def test_quota_exceeded_is_said_once_and_what_runs_goes_on() -> None:
    world = waiting(workerGroups=[{"name": "cpu", "minReplicas": 1}], runPolicy={"progressDeadlineSeconds": 0})
    world.quota = len(world.pods)
    world.apply(replicas=4)
    assert world.condition("Scheduled") == "False/QuotaExceeded"
    assert world.condition("Ready") == "True/EnoughWorkers"
    waits = []
    for _ in range(7):
        waits.append((world.plan().due - world.now).total_seconds())
        world.tick(waits[-1])
        world.then.collect(world.job.status.frames.collected)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    assert world.told.count("QuotaExceeded") == 1
    world.quota = None
    world.tick(60)
    world.run()
    assert (len(world.live()), world.condition("Scheduled")) == (4, "True/AllPodsScheduled")


def test_refused_creation_is_reported_once_and_stops_nothing() -> None:
    world = waiting(workerGroups=[{"name": "cpu", "minReplicas": 1}], runPolicy={"progressDeadlineSeconds": 0})
    before = {pod.uid for pod in world.live()}
    world.api.refused["TRY"], world.api.refusal = 500, {"message": "failed calling webhook"}
    world.apply(workerGroups=[{"name": "cpu", "minReplicas": 1, "resources": {"requests": {"cpu": "2"}}}])
    assert world.condition("Scheduled") == "False/ApiServerError"
    assert world.message("Scheduled") == "failed calling webhook"
    assert {pod.uid for pod in world.live()} == before
    assert (world.plan().due - world.now).total_seconds() == 5
    assert world.told.count("ApiServerError") == 1
    world.tick(5)
    world.api.refused.clear()
    world.run()
    assert world.condition("Scheduled") == "True/AllPodsScheduled"
    assert not before & {pod.uid for pod in world.live() if pod.role == "worker"}


def test_job_waits_for_days_for_an_operator_that_may_create_pods() -> None:
    world = World()
    words = 'pods is forbidden: User "operator" cannot create resource "pods" in API group ""'
    world.api.refused["TRY"], world.api.refusal = 403, {"message": words}
    for _ in range(48):
        world.settle()
        assert (world.condition("Accepted"), world.message("Accepted")) == ("False/Forbidden", words)
        world.tick(3600)
    world.api.refused.clear()
    world.run()
    assert (world.condition("Accepted"), world.condition("Failed")) == ("True/Accepted", "")


@pytest.mark.parametrize(("choice", "end"), [("Wait", ""), ("Fail", "True/Unschedulable")])
def test_unschedulable_pods_are_explained_and_wait_or_fail_the_job(choice: str, end: str) -> None:
    policy = {"unschedulableAfterSeconds": 600, "onUnschedulable": choice}
    world = World(replicas=4, workerGroups=[{"name": "cpu", "minReplicas": 1}], runPolicy=policy)
    world.settle()
    for name in ("pong-head-1", *(pod.name for pod in world.live()[:2])):
        world.start(name)
    for pod in world.live()[2:]:
        world.block(pod.name, Obstacle.UNSCHEDULABLE, "0/3 nodes are available: insufficient nvidia.com/gpu")
    world.then.collect(500)
    assert world.condition("Scheduled") == "False/Unschedulable"
    assert "insufficient nvidia.com/gpu; 2 pods are waiting" in world.message("Scheduled")
    assert world.job.status.phase == "Degraded"
    world.tick(600)
    world.collect(1000)
    assert world.step().actions == ()
    assert world.condition("Failed") == end


def ends_after(world: World, seconds: int, *, kind: str = "Failed", reason: str = "StartupDeadlineExceeded") -> None:
    """Its time begins now: a second before its end the job goes on, and then it does not."""
    world.wait(seconds - 1)
    assert world.condition(kind) == ""
    world.wait(1)
    assert world.condition(kind) == f"True/{reason}"


def test_workers_that_never_restart_hit_the_startup_deadline() -> None:
    world = running(workerGroups=[{"name": "cpu", "minReplicas": 2}], runPolicy={"startupDeadlineSeconds": 900})
    world.then.delete(world.live()[0].name)
    world.block(world.live()[0].name, Obstacle.IMAGE_PULL, "image x: not found")
    for frames in range(2000, 7000, 1000):
        world.tick(600)
        world.then.collect(frames)
    assert (world.condition("Ready"), world.condition("Failed")) == ("False/TooFewWorkers", "")
    world.wait(900)
    assert world.condition("Failed") == "True/StartupDeadlineExceeded"


@pytest.mark.parametrize("ready", [0, 1])
def test_silent_head_holds_the_startup_deadline_while_a_worker_is_ready(ready: int) -> None:
    world = running(workerGroups=[{"name": "cpu", "minReplicas": 2}], runPolicy={"startupDeadlineSeconds": 900})
    for pod in world.live()[ready:]:
        world.delete(pod.name)
    world.settle()
    for pod in world.live():
        if not pod.is_ready:
            world.block(pod.name, Obstacle.IMAGE_PULL, "image x: not found")
    world.known.is_silent = True
    world.settle()
    assert world.condition("Ready") == "False/TooFewWorkers"
    world.wait(899)
    assert world.condition("Failed") == ""
    world.wait(1)
    # Whatever the head would say: without workers nothing was collected.
    assert world.condition("Failed") == ("" if ready else "True/StartupDeadlineExceeded")


def test_workers_that_wait_for_room_are_waited_for() -> None:
    world = running(replicas=1, runPolicy={"startupDeadlineSeconds": 900, "onStall": "Fail"})
    world.then.delete(world.live()[0].name)
    name = world.live()[0].name
    world.block(name, Obstacle.UNSCHEDULABLE, "0/3 nodes are available")
    world.wait(5000)
    world.then.place(name)
    ends_after(world, 900)


def test_room_that_is_not_wanted_any_more_holds_no_deadline() -> None:
    world = running(workerGroups=[{"name": "cpu", "minReplicas": 2}], runPolicy={"startupDeadlineSeconds": 900})
    world.quota = len(world.pods)
    world.apply(replicas=3)
    assert world.condition("Scheduled") == "False/QuotaExceeded"
    world.apply(replicas=2)
    world.then.unready(world.live()[0].name)
    ends_after(world, 900)


def test_startup_deadline_begins_anew_with_each_head_pause_and_suspension() -> None:
    world = running(runPolicy={"startupDeadlineSeconds": 900})

    def waits_for_an_image(seconds: int) -> None:
        world.then.block(world.head.name, Obstacle.IMAGE_PULL, "image x: not found")
        world.wait(seconds)
        assert world.condition("Failed") == ""

    world.then.evict("pong-head-1")
    waits_for_an_image(899)
    assert world.plan().due == world.now + timedelta(seconds=1)
    world.then.vanish("pong-head-2")
    waits_for_an_image(899)
    world.edit(paused=True)
    waits_for_an_image(5000)
    world.apply(paused=False)
    waits_for_an_image(899)
    world.apply(suspend=True)
    world.wait(5000)
    world.apply(suspend=False)
    waits_for_an_image(0)
    ends_after(world, 900)
    assert world.message("Failed") == (
        "the job did not become ready again within startupDeadlineSeconds (900): pong-head-4: image x: not found"
    )


def test_dead_head_with_refused_template_hits_startup_deadline() -> None:
    world = running(runPolicy={"startupDeadlineSeconds": 900})
    world.bad_image = "example/broken:1"
    world.apply(image="example/broken:1")
    world.then.evict("pong-head-1")
    assert (world.condition("Accepted"), world.condition("Ready")) == ("False/InvalidPodTemplate", "False/HeadNotReady")
    # The operator was away meanwhile: it asks once more before it gives up.
    world.restart_operator()
    world.tick(900)
    checks = len(of_kind(world.done, CheckTemplate))
    world.settle()
    assert len(of_kind(world.done, CheckTemplate)) > checks
    assert world.condition("Failed") == "True/StartupDeadlineExceeded"
    assert "image example/broken:1 is not allowed here" in world.message("Failed")


def test_namespace_that_is_terminating_is_left_quietly() -> None:
    world = World()
    world.api.refused["POST"] = 404
    world.settle()
    assert world.condition("Scheduled") == "False/NamespaceTerminating"
    assert ("NamespaceTerminating" in world.told, world.pods) == (False, {})


# -- drift and silence -----------------------------------------------------------------------------------------


def test_secret_exists_before_its_head_and_is_made_once() -> None:
    world = running()
    (order,) = of_kind(world.done, CreateTokens)
    assert ("ConfigMap", order.claim["metadata"]["name"]) in world.children
    world.finish("pong-head-1")
    orders = [type(action) for action in world.step().actions]
    assert orders.index(CreateTokens) < orders.index(CreatePod)
    assert of_kind(world.done, CreateTokens)[-1] == CreateTokens()
    world.settle()
    assert of_kind(world.plan().actions, CreateTokens) == []
    world.block(world.live()[0].name, Obstacle.CONTAINER_CONFIG, 'secret "pong-tokens" not found')
    assert of_kind(world.step().actions, CreateTokens) == [CreateTokens()], "pods miss it"


def test_silent_head_is_unknown_and_nothing_is_done_to_it() -> None:
    world = running(runPolicy={"onStall": "Fail"})
    world.known.is_silent = True
    world.settle()
    assert world.condition("Progressing") == "Unknown/ControlPlaneUnreachable"
    assert world.condition("Ready") == "True/EnoughWorkers"
    assert world.told.count("ControlPlaneUnreachable") == 1
    world.wait(100_000)
    assert not changes(world.plan())
    assert (world.condition("Stalled"), world.condition("Failed")) == ("False/NotStalled", "")
    # It is heard again, and has the whole time: what it did meanwhile is not known.
    world.then.say(world.head)
    ends_after(world, 600, reason="Stalled")


def test_answering_head_without_frames_is_stalled_and_restarted() -> None:
    world = waiting()
    world.tick(599)
    assert of_kind(world.step().actions, Delete) == []
    world.tick(1)
    plan = world.step()
    assert world.condition("Stalled") == "True/NoProgress"
    assert {action.name for action in of_kind(plan.actions, Delete)} == {
        "pong-head-1",
        "pong-cpu-0-sajfv",
        "pong-cpu-1-2kbti",
    }
    assert world.job.status.head_restarts == 1
    world.tick(60)
    world.run()
    assert (world.head.name, world.head.failures, world.job.status.head_restarts) == ("pong-head-2", 1, 1)
    assert world.condition("Stalled") == "False/NotStalled"


def test_learners_have_their_time_after_the_operator_was_away() -> None:
    world = running(runPolicy={"drainSeconds": 600})
    world.then.collect(100_000, settled=90_000)
    world.restart_operator()
    world.wait(10_000)
    assert world.condition("Completed") == ""
    world.then.say(world.head, frames=100_000, settled=95_000)
    ends_after(world, 600, kind="Completed", reason="DrainTimedOut")


def test_job_that_waits_for_room_from_its_birth_waits_for_days() -> None:
    world = World(runPolicy={"startupDeadlineSeconds": 900})
    world.quota = 0
    for _ in range(60):
        world.wait(3600)
    assert (world.condition("Scheduled"), world.condition("Failed")) == ("False/QuotaExceeded", "")
    world.quota = None
    world.wait(60)
    for pod in world.pods:
        world.block(pod, Obstacle.UNSCHEDULABLE, "Scheduling is blocked due to non-empty scheduling gates")
    world.wait(500_000)
    assert (world.condition("Scheduled"), world.condition("Failed")) == ("False/Unschedulable", "")
    world.then.place(world.head.name)
    ends_after(world, 900)


@pytest.mark.parametrize(
    ("known", "reason", "words"),
    [
        ({"is_token_refused": True}, "TokenRefused", "Secret pong-tokens"),
        ({"silence": "certificate verify failed"}, "ControlPlaneUnreachable", "certificate verify failed"),
    ],
)
def test_head_that_answers_in_vain_is_a_condition_only(known: dict[str, Any], reason: str, words: str) -> None:
    world = running()
    plan = world.plan(now=world.now + timedelta(days=1), is_silent=True, **known)
    assert plan.actions == ()
    (fact,) = [fact for fact in plan.status.conditions if fact.type == "Progressing"]
    assert (fact.status, fact.reason, words in fact.message) == ("Unknown", reason, True)


def test_pause_and_waiting_for_a_learner_are_no_stall() -> None:
    world = running()
    world.say(world.head, is_queue_full=True, per_second=0.0)
    world.wait(6000)
    assert world.condition("Progressing") == "True/WaitingForConsumer"
    world.then.say(world.head, is_queue_full=False)
    world.wait(599)
    world.then.say(world.head, pause_state="paused", is_leased=True)
    assert (world.condition("Paused"), world.job.status.phase) == ("True/API", "Paused")
    world.wait(6000)
    world.then.say(world.head, pause_state="running", is_leased=False)
    world.wait(599)
    assert world.condition("Stalled") == "False/NotStalled"
    assert world.head.name == "pong-head-1"


def test_status_stays_small_however_many_pods_fail() -> None:
    world = running(replicas=30, runPolicy={"progressDeadlineSeconds": 0})
    for pod in world.live():
        world.finish(pod.name, message="x" * 1024)
    world.settle()
    assert len(world.job.status.recent_failures) == 10
    assert not changes(world.plan())


def test_pause_keeps_pods_and_looks_like_no_lease_when_it_is_taken_back() -> None:
    world = running()
    pods = set(world.pods)
    world.apply(paused=True)
    assert (world.known.answer.is_spec_paused, set(world.pods), world.job.status.phase) == (True, pods, "Paused")
    assert (world.condition("Paused"), world.message("Paused")) == ("True/Spec", "paused by spec.paused")
    assert world.told.count("Paused") == 1
    world.apply(paused=False)
    # Told to go on, it has not said yet that it does.
    world.then.say(world.head, pause_state="paused", is_spec_paused=False)
    assert world.condition("Paused") == "False/NotPaused"
