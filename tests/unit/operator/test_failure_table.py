"""What must happen on each failure: one test a row of the table that the operator is built to; and on a new leader."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from cormorant_contract.status import CollectorJobStatus, FramesStatus
from cormorant_operator import names
from cormorant_operator.decide.plan import ApplyChild, CheckTemplate, CreatePod, Delete, DrainHead, Plan
from cormorant_operator.decide.reconcile import reconcile
from cormorant_operator.decide.status import refused_status
from cormorant_operator.job import Unreadable, read_job
from cormorant_operator.settings import OperatorDefaults
from cormorant_testing.operator_world import World, changes, make_document, of_kind, running, waiting


def fail_first(world: World) -> None:
    world.then.finish(world.live()[0].name, exit_code=137, reason="OOMKilled")


# -- workers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("happens", [World.delete, World.evict])
def test_deleted_or_evicted_worker_is_replaced_uncounted(happens: Callable[[World, str], None]) -> None:
    world = running()
    happens(world, "pong-cpu-0-sajfv")
    plan = world.step()
    assert [action.manifest["metadata"]["name"][:11] for action in of_kind(plan.actions, CreatePod)] == ["pong-cpu-0-"]
    assert of_kind(plan.actions, Delete) == []
    world.settle()
    assert (world.slots(), world.live()[0].failures) == (["cpu-0", "cpu-1"], 0)
    assert world.job.status.groups[0].restarts == 0


@pytest.mark.parametrize("restarts", [False, True], ids=["one operator", "another one each time"])
def test_worker_oom_loop_backs_off_then_fails_the_job(restarts: bool) -> None:
    world = waiting(runPolicy={"maxRestartsPerSlot": 4, "progressDeadlineSeconds": 0})
    waits = []
    for _ in range(4):
        fail_first(world)
        if restarts:
            world.then.restart_operator()
        plan = world.plan()
        wait = (plan.due - world.now).total_seconds() if len(world.live()) < 2 and plan.due else 0.0
        waits.append(wait)
        if wait:
            assert world.job.status.phase == "Degraded"
            world.wait(wait - 1)
            assert len(world.live()) == 1, "nothing is created before the back-off is over"
            world.tick(1)
        world.settle()
        world.then.start_all()
    assert waits == [0.0, 10.0, 20.0, 40.0]
    failures = world.job.status.recent_failures
    assert [(failure.reason, failure.exit_code) for failure in failures] == [("OOMKilled", 137)] * 4
    assert world.job.status.groups[0].restarts == 4
    fail_first(world)
    assert world.condition("Failed") == "True/SlotRestartsExceeded"
    assert "cpu-0 failed 5 times in a row (maxRestartsPerSlot 4)" in world.message("Failed")


def test_failures_are_forgotten_after_ten_healthy_minutes() -> None:
    world = waiting(runPolicy={"progressDeadlineSeconds": 0})

    def records() -> int:
        return [pod.phase for pod in world.pods.values()].count("Failed")

    fail_first(world)
    world.then.start_all()
    assert (records(), world.plan().due) == (1, world.now + timedelta(seconds=600))
    world.wait(600)
    assert records() == 0
    for _ in range(3):
        world.then.finish(world.live()[0].name, ran_s=601)
        world.then.start_all()
    assert [pod.failures for pod in world.live()] == [1, 0]
    assert world.job.status.groups[0].restarts == 4


def test_worker_on_a_lost_node_is_followed_at_once_and_superseded() -> None:
    world = running()
    old = world.live()[0]
    world.then.lose(old.name)
    assert world.slots() == ["cpu-0", "cpu-1"]
    assert (world.live()[0].name != old.name, world.live()[0].attempt) == (True, 1)
    assert old.name in world.pods, "it is not deleted by force"
    world.start_all()
    # Without our own check of two live pods: the cluster brings it back, not we.
    world.record().pod_index.put(old)
    plan = world.plan()
    assert [action.name for action in of_kind(plan.actions, Delete)] == [old.name]
    assert of_kind(plan.actions, CreatePod) == []


# -- the head --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reason", "code"), [("OOMKilled", 137), ("Error", 1)])
def test_head_killed_begins_a_new_epoch_and_workers_stay(reason: str, code: int) -> None:
    world = running()
    workers = [pod.name for pod in world.live()]
    words = f"{reason}, exit code {code}: the fleet lost its store"
    message = '{"frames": 1000, "reason": "the fleet lost its store"}'
    world.finish("pong-head-1", exit_code=code, reason=reason, message=message)
    plan = world.step()
    assert [note.message for note in plan.events if "Failed" in note.reason] == [f"pong-head-1: {words}"]
    assert (plan.status.reason, plan.status.recent_failures[-1].message) == ("HeadFailed", "the fleet lost its store")
    (created,) = of_kind(plan.actions, CreatePod)
    assert created.manifest["metadata"]["name"] == "pong-head-2"
    selectors = {a.manifest["spec"]["selector"]["cormorant.dev/epoch"] for a in of_kind(plan.actions, ApplyChild)}
    assert selectors == {"2"}, "Services lead to the new head alone"
    world.settle()
    assert (world.job.status.epoch, world.job.status.head_restarts) == (2, 1)
    world.settle()
    assert world.job.status.phase == "Restarting"
    assert [pod.name for pod in world.live()] == workers


def test_only_unacknowledged_frames_of_a_dead_head_repeat() -> None:
    world = running()
    world.tick(20)
    world.then.collect(5000, settled=3000)
    assert (world.job.status.frames.collected, world.job.status.frames.settled) == (5000, 3000)
    # Learners acknowledged more after the operator had asked last; 4000 is in what the kubelet read.
    world.finish("pong-head-1", exit_code=137, reason="OOMKilled", message='{"frames": 4000}')
    (created,) = of_kind(world.step().actions, CreatePod)
    command = created.manifest["spec"]["containers"][0]["command"]
    assert command[command.index("--floor-frames") + 1] == "4000"
    world.settle()
    frames = world.job.status.frames
    assert (world.job.status.epoch, frames.collected, frames.settled) == (2, 4000, 4000)
    world.start("pong-head-2")
    world.tick(20)
    world.then.collect(4500, settled=4000)
    assert world.job.status.frames.collected == 4500


def test_vanished_head_does_not_make_a_job_look_complete() -> None:
    world = running(runPolicy={"drainSeconds": 60, "maxHeadRestarts": 9})
    world.then.collect(100_000, settled=90_000)
    assert world.job.status.phase == "Completing"
    world.then.vanish("pong-head-1")
    world.restart_operator()
    world.start("pong-head-2")
    world.tick(20)
    world.then.collect(95_000, settled=90_000)
    world.wait(61)
    assert (world.condition("Completed"), world.job.status.phase) == ("", "Running")


def test_job_that_lost_its_frames_has_still_started() -> None:
    world = running(runPolicy={"startupDeadlineSeconds": 60})
    world.vanish("pong-head-1")
    lost = FramesStatus(collected=500, last_progress_time=world.now)
    world.job = replace(world.job, status=world.job.status.model_copy(update={"frames": lost}))
    world.known.answer = None
    world.run()
    world.wait(61)
    assert (world.job.status.frames.collected, world.condition("Failed")) == (0, "")


def test_head_that_fails_too_often_fails_the_job() -> None:
    world = running(runPolicy={"maxHeadRestarts": 2, "progressDeadlineSeconds": 0})
    for _ in range(3):
        world.finish(world.head.name)
        world.wait(400)
        world.start_all()
    assert world.condition("Failed") == "True/HeadRestartsExceeded"
    assert "failed 3 times in a row (maxHeadRestarts 2)" in world.message("Failed")
    assert world.job.status.phase == "Failed"


@pytest.mark.parametrize("happens", [World.evict, World.lose, World.vanish])
def test_evicted_lost_or_vanished_head_is_followed_uncounted(happens: Callable[[World, str], None]) -> None:
    world = running(runPolicy={"maxHeadRestarts": 0})
    old = world.head
    happens(world, "pong-head-1")
    world.settle()
    assert (world.head.name, world.job.status.head_restarts) == ("pong-head-2", 0)
    if happens is World.lose:
        assert world.pods["pong-head-1"].is_terminating
        world.record().pod_index.put(old)  # its node comes back
        assert [action.name for action in of_kind(world.plan().actions, Delete)] == ["pong-head-1"]


def test_deleted_head_that_ran_may_count_its_last_frames() -> None:
    world = World()
    world.settle()
    # Its image is being pulled: it has a node and nothing to count.
    world.place("pong-head-1")
    world.then.delete("pong-head-1")
    assert world.head.name == "pong-head-2"
    world = running()
    world.then.delete("pong-head-1")
    assert world.plan().due == world.pods["pong-head-1"].deletion_deadline
    world.then.finish("pong-head-1", exit_code=143, message='{"frames": 1234}')
    assert (world.head.name, world.job.status.frames.collected) == ("pong-head-2", 1234)
    assert world.job.status.head_restarts == 0


# -- the operator ----------------------------------------------------------------------------------------------


def test_operators_agree_on_the_successor_of_a_pod() -> None:
    world = running()
    victim = world.live()[0].name
    world.delete(victim)
    (early,) = of_kind(world.plan().actions, CreatePod)
    world.vanish(victim)
    (late,) = of_kind(world.plan().actions, CreatePod)
    assert early.manifest["metadata"]["name"] == late.manifest["metadata"]["name"] != victim
    world.do(early)
    world.do(late)
    assert world.slots() == ["cpu-0", "cpu-1"]
    # Its plan is still under way when the pod has gone, and has a successor.
    world.then.vanish(early.manifest["metadata"]["name"])
    world.do(early)
    world.do(Delete(kind="Pod", name=world.live()[0].name, uid="of-an-earlier-pod", why="a late plan"))
    assert "deletionTimestamp" not in world.api.stored["Pod", world.live()[0].name]["metadata"]
    assert (world.slots(), world.live()[0].attempt) == (["cpu-0", "cpu-1"], 2)


# -- who may talk to pods --------------------------------------------------------------------------------------


def test_network_policy_opens_api_and_metrics_to_others_only() -> None:
    world = World(defaults=OperatorDefaults(has_network_policies=True))
    (policy,) = [a.manifest for a in of_kind(world.plan().actions, ApplyChild) if a.manifest["kind"] == "NetworkPolicy"]
    own = {"matchLabels": {"cormorant.dev/job-uid": world.job.uid}}
    assert policy["spec"]["podSelector"] == own
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    among, others = policy["spec"]["ingress"]
    assert among == {"from": [{"podSelector": own}]}
    assert others["from"] == [{"namespaceSelector": {}}]
    assert [port["port"] for port in others["ports"]] == [8000, 8001]
    world.run()
    for action in of_kind(world.done, CreatePod):
        assert own["matchLabels"].items() <= action.manifest["metadata"]["labels"].items()
        (container,) = action.manifest["spec"]["containers"]
        assert {p["containerPort"] for p in container["ports"] if p["name"] != "gcs"} <= {8000, 8001}
    world.vanish("pong-pods", "NetworkPolicy")
    world.settle()
    assert ("NetworkPolicy", "pong-pods") in world.children
    assert {kind for kind, _ in running().children} == {"Service", "ConfigMap", "PodDisruptionBudget"}


# -- manifests -------------------------------------------------------------------------------------------------


def test_template_that_the_api_server_refuses_tears_nothing_down() -> None:
    world = running()
    pods = set(world.pods)
    world.bad_image = "example/broken:1"
    world.apply(image="example/broken:1")
    assert world.condition("Accepted") == "False/InvalidPodTemplate"
    assert "example/broken:1 is not allowed here" in world.message("Accepted")
    assert set(world.pods) == pods
    assert world.told.count("InvalidPodTemplate") == 1
    checks = len(of_kind(world.done, CheckTemplate))
    world.tick(599)
    world.then.collect(2000)
    assert len(of_kind(world.done, CheckTemplate)) == checks, "no hot loop"
    world.wait(1)
    assert len(of_kind(world.done, CheckTemplate)) > checks, "it may be allowed by now"
    world.apply(image="example/cormorant:1")
    assert world.condition("Accepted") == "True/Accepted"
    assert set(world.pods) == pods


def test_unreadable_manifest_is_reported_and_nothing_changes() -> None:
    job = read_job(make_document(generation=3, collection={"framesPerBatch": 63}))
    assert isinstance(job, Unreadable)
    status = refused_status(job, running().now)
    (accepted,) = status.conditions
    assert (accepted.status, accepted.reason, accepted.observed_generation) == ("False", "InvalidSpec", 3)
    assert "framesPerBatch 63 is not a multiple of numEnvs 8" in accepted.message
    assert refused_status(replace(job, status=status), running().now) is None


def test_template_of_a_group_rolls_one_worker_at_a_time() -> None:
    world = running(replicas=3)
    group = {"name": "cpu", "template": {"spec": {"nodeSelector": {"disk": "ssd"}}}}
    world.apply(workerGroups=[group])
    assert world.condition("Updating") == "True/RollingUpdate"
    assert world.head.name == "pong-head-1"
    rolled = 0
    for _ in range(20):
        unready = [pod for pod in world.live() if not pod.is_ready]
        assert sum(pod.is_ready for pod in world.live()) >= 2
        if not unready:
            break
        world.start(unready[0].name)
        rolled += 1
        world.settle()
    assert rolled == 3
    assert {pod.attempt for pod in world.live()} == {1}
    assert world.condition("Updating") == "False/UpToDate"


def test_rollback_during_a_roll_keeps_what_was_not_rolled() -> None:
    world = running(replicas=3)
    world.apply(workerGroups=[{"name": "cpu", "resources": {"requests": {"cpu": "2"}}}])
    world.edit(workerGroups=[{"name": "cpu"}])
    world.run()
    assert sorted(pod.attempt > 0 for pod in world.live()) == [False, False, True]


@pytest.mark.parametrize(
    ("image", "device", "cuda_image", "worker", "next_worker"),
    [
        ("", "cpu", "cormorant:1", "cormorant-cpu:1", "cormorant-cpu:2"),
        ("", "gpu", "cormorant:1", "cormorant:1", "cormorant:2"),
        ("", "gpu", "", "cormorant-cpu:1", "cormorant:2"),  # of an operator that had one image
        ("mine:1", "gpu", "cormorant:1", "mine:1", "mine:1"),
    ],
)
def test_upgraded_operator_keeps_images_until_the_next_head(
    image: str, device: str, cuda_image: str, worker: str, next_worker: str
) -> None:
    def images() -> list[str]:
        return [world.head.image, *(pod.image for pod in world.live())]

    old = OperatorDefaults(image="cormorant-cpu:1", cuda_image=cuda_image)
    world = running(image=image, workerGroups=[{"name": "cpu", "device": device}], defaults=old)
    world.defaults = OperatorDefaults(image="cormorant-cpu:2", cuda_image="cormorant:2")
    kept = [image or "cormorant-cpu:1", worker, worker]
    assert (changes(world.plan()), images()) == ((), kept)
    # Ray wants one version in all pods.
    world.then.delete(world.live()[0].name)
    assert images() == kept
    world.evict("pong-head-1")
    world.tick(60)
    world.run()
    assert images() == [image or "cormorant-cpu:2", next_worker, next_worker]


# -- the end of objects ----------------------------------------------------------------------------------------


def test_job_that_is_being_deleted_is_left_alone() -> None:
    world = running()
    world.delete("pong-head-1")
    job = replace(world.job, is_deleting=True)
    assert reconcile(job, world.record(), world.state(), world.now, defaults=world.defaults) == Plan()


def test_names_fit_and_two_jobs_of_one_name_share_none() -> None:
    assert len(names.worker_pod("j" * 40, "uid", group="g" * 10, index=9999, attempt=10**6)) <= 63
    first = names.worker_pod("pong", "uid-a", group="cpu", index=0, attempt=0)
    assert first != names.worker_pod("pong", "uid-b", group="cpu", index=0, attempt=0)


# -- a new leader: nothing ends, stalls or goes before it has heard --------------------------------------------


STRICT = {
    "startupDeadlineSeconds": 300,
    "progressDeadlineSeconds": 300,
    "drainSeconds": 60,
    "onStall": "Fail",
    "unschedulableAfterSeconds": 200,
    "onUnschedulable": "ScaleToFit",
}
Step = Callable[[World], object]
START: tuple[Step, ...] = (
    World.step,
    World.step,
    World.place_all,
    World.step,
    lambda world: world.start("pong-head-1"),
    World.settle,
    lambda world: world.start(world.live()[0].name),
    World.settle,
    World.start_all,
    World.settle,
    lambda world: world.tick(20),
    lambda world: world.collect(28_672, settled=8_192),
    World.settle,
)
SCHEDULES: dict[str, tuple[Step, ...]] = {
    "workers turn unready": (*START, lambda world: [world.unready(pod.name) for pod in world.live()], World.settle),
    "a worker is replaced": (*START, lambda world: world.vanish(world.live()[0].name), World.settle, World.place_all),
    "the head is replaced": (
        *START,
        lambda world: world.vanish("pong-head-1"),
        World.settle,
        World.place_all,
        World.step,
        World.start_all,
        World.settle,
    ),
    "the head turns unready": (*START, lambda world: world.unready("pong-head-1"), World.settle),
    "a pause": (*START, lambda world: world.edit(paused=True), World.settle, lambda world: world.edit(paused=False)),
    "the last frames": (*START, lambda world: world.collect(100_000, settled=90_000), World.settle),
    "a scale-down": (*START, lambda world: world.edit(replicas=1), World.step),
    "a suspension": (*START, lambda world: world.edit(suspend=True), World.step),
}


@pytest.mark.parametrize("absence_s", [310, 86_400])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_new_leader_with_any_stored_status_harms_nothing(schedule: str, absence_s: int) -> None:
    first = 1 if schedule == next(iter(SCHEDULES)) else len(START) + 1  # they begin alike
    for length in range(first, len(SCHEDULES[schedule]) + 1):
        statuses = _replay(schedule, length)[1]
        for stored in dict.fromkeys(statuses):
            _lead(schedule, length, stored, absence_s)


def _replay(schedule: str, length: int) -> tuple[World, list[CollectorJobStatus]]:
    world, statuses = World(runPolicy=STRICT), []
    for step in SCHEDULES[schedule][:length]:
        step(world)
        statuses.append(world.job.status)
    return world, statuses


def _lead(schedule: str, length: int, stored: CollectorJobStatus, absence_s: int) -> None:
    """A new leader comes after step `length`, and the status is of an earlier one."""
    world, _ = _replay(schedule, length)
    world.job = replace(world.job, status=stored)
    world.tick(absence_s)
    answer, healthy = world.known.answer, {pod.uid for pod in world.pods.values() if pod.is_ready}
    world.restart_operator()
    _watch(world)
    world.tick(5)  # the head answers
    head = next((pod for pod in world.pods.values() if pod.role == "head" and pod.is_ready), None)
    if answer is not None and head is not None and head.uid == answer.pod_uid:
        world.say(head, frames=answer.frames, settled=answer.settled)
    _watch(world)
    assert schedule == "a scale-down" or healthy <= {pod.uid for pod in world.pods.values()}


def _watch(world: World) -> None:
    """Let the leader do what it wants: nothing ends, stalls, or is deleted, but what its head has released."""
    for _ in range(8):
        plan = world.step()
        assert not world.job.is_over, (world.condition("Failed"), world.condition("Completed"))
        assert world.condition("Stalled") != "True/NoProgress"
        reasons = {order.why for order in of_kind(plan.actions, Delete)}
        assert reasons <= ({"its group was scaled down"} if world.known.answer is not None else set())
        if not changes(plan):
            return


def test_head_whose_creation_failed_takes_no_epoch() -> None:
    world = World()
    world.step()
    plan = world.plan()
    (created,) = [action for action in of_kind(plan.actions, CreatePod) if action.owner == "head"]
    world.write(plan)  # every action failed, or its answer was lost
    assert world.job.status.epoch == 0
    again = [action for action in of_kind(world.plan().actions, CreatePod) if action.owner == "head"]
    assert [action.manifest["metadata"]["name"] for action in again] == [created.manifest["metadata"]["name"]]


def test_drain_of_a_leader_that_went_has_its_full_time() -> None:
    world = running(runPolicy={"drainSeconds": 60})
    world.edit(suspend=True)
    world.step(crash_after=1)  # marked, and not told
    world.tick(3600)
    world.restart_operator()
    world.unready("pong-head-1")
    assert (world.head.draining_since is not None, world.step().poll_s) == (True, world.defaults.fast_poll_s)
    world.wait(59)
    assert not world.head.is_terminating
    world.say(world.head)
    assert len(of_kind(world.step().actions, DrainHead)) == 1
