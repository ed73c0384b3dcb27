"""No room, a silent head, and others who change what is ours: the rest of the table."""

from cormorant_operator.children import digest_of, services
from cormorant_operator.observed import Obstacle, Refusal, RefusalKind
from cormorant_operator.plan import (
    ApplyChild,
    CreatePod,
    CreateTokens,
    DeletePod,
    TellHead,
)
from cormorant_testing.operator_world import World, of_kind, running, waiting

# -- room ------------------------------------------------------------------------------------------------------


def test_quota_exceeded_is_said_once_and_what_runs_goes_on() -> None:
    world = waiting(workerGroups=[{"name": "cpu", "minReplicas": 1}], runPolicy={"progressDeadlineSeconds": 0})
    world.quota = len(world.pods)
    world.edit(replicas=4)
    world.settle()
    assert world.condition("Scheduled") == "False/QuotaExceeded"
    assert world.condition("Ready") == "True/EnoughWorkers"
    waits = []
    for _ in range(7):
        due = world.plan().due
        assert due is not None
        waits.append((due - world.now).total_seconds())
        world.tick(waits[-1])
        world.collect(world.job.status.frames.collected)
        world.settle()
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    assert world.told.count("QuotaExceeded") == 1
    world.quota = None
    world.tick(60)
    world.run()
    assert (len(world.live()), world.condition("Scheduled")) == (4, "True/AllPodsScheduled")


def test_what_the_api_server_cannot_make_is_said_once_and_what_runs_goes_on() -> None:
    world = waiting(workerGroups=[{"name": "cpu", "minReplicas": 1}], runPolicy={"progressDeadlineSeconds": 0})
    before = {pod.uid for pod in world.live()}
    # As the executor notes it: a dry run of the new template that was answered with 500.
    world.edit(workerGroups=[{"name": "cpu", "minReplicas": 1, "resources": {"requests": {"cpu": "2"}}}])
    fault = Refusal(kind=RefusalKind.SERVER, message="failed calling webhook", at=world.now)
    world.refusals["Pod"] = fault
    world.settle()
    assert world.condition("Scheduled") == "False/ApiServerError"
    assert world.message("Scheduled") == "failed calling webhook"
    assert {pod.uid for pod in world.live()} == before
    due = world.plan().due
    assert due is not None
    assert (due - world.now).total_seconds() == 5
    assert world.told.count("ApiServerError") == 1
    world.tick(5)
    del world.refusals["Pod"]
    world.run()
    assert world.condition("Scheduled") == "True/AllPodsScheduled"
    assert not before & {pod.uid for pod in world.live() if pod.role == "worker"}


def unschedulable(**policy: object) -> World:
    """Two of four workers wait for a node."""
    world = World(
        replicas=4,
        workerGroups=[{"name": "cpu", "minReplicas": 1}],
        runPolicy={"unschedulableAfterSeconds": 600, **policy},
    )
    world.settle()
    for name in ("pong-head-1", *(pod.name for pod in world.live()[:2])):
        world.start(name)
    for pod in world.live()[2:]:
        world.block(pod.name, Obstacle.UNSCHEDULABLE, "0/3 nodes are available: insufficient nvidia.com/gpu")
    world.collect(500)
    world.settle()
    return world


def test_unschedulable_pods_are_explained_and_left_in_the_queue() -> None:
    world = unschedulable()
    assert world.condition("Scheduled") == "False/Unschedulable"
    assert "insufficient nvidia.com/gpu; 2 pods wait" in world.message("Scheduled")
    assert world.job.status.phase == "Degraded"
    world.tick(601)
    world.collect(1000)
    plan = world.step()
    assert plan.actions == ()
    assert world.condition("Failed") == ""


def test_unschedulable_pods_fail_the_job_where_it_is_told_so() -> None:
    world = unschedulable(onUnschedulable="Fail")
    world.tick(600)
    world.settle()
    assert world.condition("Failed") == "True/Unschedulable"


def test_unschedulable_pods_are_not_counted_on_where_the_job_scales_to_fit() -> None:
    world = unschedulable(onUnschedulable="ScaleToFit")
    world.tick(600)
    world.collect(1000)
    plan = world.step()
    assert [dict(action.sizes) for action in of_kind(plan.actions, TellHead)] == [{"cpu": 2}]
    assert of_kind(plan.actions, DeletePod) == []
    world.settle()
    world.start_all()
    assert [dict(action.sizes) for action in of_kind(world.step().actions, TellHead)] == [{"cpu": 4}]


def test_unschedulable_pods_make_no_stall() -> None:
    world = World(replicas=2)
    world.settle()
    world.start("pong-head-1")
    for pod in world.live():
        world.block(pod.name, Obstacle.UNSCHEDULABLE, "0/3 nodes are available")
    world.tick(1700)
    world.settle()
    assert world.condition("Stalled") == "False/NotStalled"


def test_image_that_cannot_be_pulled_is_said_and_ends_at_the_startup_deadline() -> None:
    world = World(runPolicy={"startupDeadlineSeconds": 900})
    world.settle()
    world.start("pong-head-1")
    world.block(world.live()[0].name, Obstacle.IMAGE_PULL, "image x: not found")
    world.settle()
    assert world.condition("Scheduled") == "False/ImagePull"
    assert world.job.status.groups[0].restarts == 0
    world.tick(900)
    world.settle()
    assert world.condition("Failed") == "True/StartupDeadlineExceeded"


def test_namespace_that_is_terminating_is_left_quietly() -> None:
    world = World()
    world.refusals["head"] = Refusal(
        kind=RefusalKind.NAMESPACE, message="namespace team-a is being terminated", at=world.now
    )
    world.settle()
    assert world.condition("Scheduled") == "False/NamespaceTerminating"
    assert "NamespaceTerminating" not in world.told
    assert of_kind(world.done, CreatePod) == []


# -- drift and silence -----------------------------------------------------------------------------------------


def test_service_that_somebody_changed_or_deleted_is_restored() -> None:
    world = running()
    expected = dict(world.children)
    world.children["Service", "pong-head"] = "edited"
    del world.children["Service", "pong-api"]
    assert len(of_kind(world.step().actions, ApplyChild)) == 2
    assert world.children == expected


def test_service_is_compared_by_what_is_ours_only() -> None:
    (ray, _) = services(running().job, epoch=1)
    live = {**ray, "spec": {**ray["spec"], "clusterIP": "10.0.0.7", "sessionAffinity": "None"}}
    assert digest_of(live) == digest_of(ray)


def test_secret_that_pods_miss_is_made_again() -> None:
    world = running()
    world.delete(world.live()[0].name)
    world.settle()
    world.block(world.live()[0].name, Obstacle.CONTAINER_CONFIG, 'secret "pong-tokens" not found')
    assert of_kind(world.step().actions, CreateTokens) == [CreateTokens(is_first=False)]


def test_silent_control_plane_is_unknown_then_stalled_then_restarted() -> None:
    world = running()
    world.is_silent = True
    world.settle()
    assert world.condition("Progressing") == "Unknown/ControlPlaneUnreachable"
    assert world.condition("Ready") == "True/EnoughWorkers"
    world.tick(599)
    assert of_kind(world.step().actions, DeletePod) == []
    world.tick(1)
    plan = world.step()
    assert world.condition("Stalled") == "True/NoProgress"
    assert {action.pod.name for action in of_kind(plan.actions, DeletePod)} == {
        "pong-head-1",
        "pong-cpu-0-sajfv",
        "pong-cpu-1-2kbti",
    }
    assert world.job.status.head_restarts == 1
    world.tick(60)
    world.run()
    assert (world.head.name, world.head.failures, world.job.status.head_restarts) == ("pong-head-2", 1, 1)
    assert world.condition("Stalled") == "False/NotStalled"


def test_stalled_job_fails_where_it_is_told_so() -> None:
    world = running(runPolicy={"onStall": "Fail"})
    world.tick(600)
    world.settle()
    assert world.condition("Failed") == "True/Stalled"


def test_pause_and_waiting_for_a_learner_are_no_stall() -> None:
    world = running()
    world.say(world.head, is_queue_full=True, per_second=0.0)
    world.tick(6000)
    world.settle()
    assert world.condition("Progressing") == "True/WaitingForConsumer"
    world.say(world.head, is_queue_full=False)
    world.settle()
    world.tick(599)
    world.settle()
    world.say(world.head, pause_state="paused", is_leased=True)
    world.settle()
    assert (world.condition("Paused"), world.job.status.phase) == ("True/API", "Paused")
    world.tick(6000)
    world.settle()
    world.say(world.head, pause_state="running", is_leased=False)
    world.settle()
    world.tick(599)
    world.settle()
    assert world.condition("Stalled") == "False/NotStalled"
    assert world.head.name == "pong-head-1"


def test_versions_of_weights_never_go_back_at_a_head_restart() -> None:
    world = running()
    world.say(world.head, version=7, min_applied_version=6)
    world.settle()
    world.evict("pong-head-1")
    world.run()
    assert world.answer is not None
    assert world.answer.version == 0
    assert world.job.status.weights.version == 7


def test_frames_that_go_back_within_an_epoch_are_ignored() -> None:
    world = running()
    world.say(world.head, frames=10)
    world.settle()
    assert world.job.status.frames.collected == 1000


def test_status_stays_small_however_many_pods_fail() -> None:
    world = running(replicas=30, runPolicy={"progressDeadlineSeconds": 0})
    for pod in world.live():
        world.finish(pod.name, message="x" * 1024)
    world.settle()
    assert len(world.job.status.recent_failures) == 10
    assert world.plan().is_empty


def test_pause_that_was_taken_back_looks_like_no_lease() -> None:
    world = running(paused=True)
    world.settle()
    assert world.condition("Paused") == "True/Spec"
    assert (world.message("Paused"), world.told.count("Paused")) == ("workers stand still: spec.paused is true", 1)
    world.edit(paused=False)
    world.settle()
    # Told to go on, it has not said yet that it does.
    world.say(world.head, pause_state="paused", is_spec_paused=False)
    world.settle()
    assert world.condition("Paused") == "False/NotPaused"
