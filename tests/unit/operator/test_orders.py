"""What people order: sizes, pauses, suspension; and how jobs end."""

import pytest

from cormorant_operator.decide.plan import ApplyChild, CreatePod, DeleteJob, DeletePod, DrainHead, SetDesired
from cormorant_testing.operator_world import World, changes, of_kind, running

# -- orders of people ------------------------------------------------------------------------------------------


def test_scaling_up_fills_new_slots_and_tells_the_head() -> None:
    world = running()
    world.edit(replicas=4)
    plan = world.step()
    assert len(of_kind(plan.actions, CreatePod)) == 2
    assert [action.desired.groups for action in of_kind(plan.actions, SetDesired)] == [{"cpu": 4}]
    world.run()
    assert world.slots() == ["cpu-0", "cpu-1", "cpu-2", "cpu-3"]
    assert world.job.status.elastic.replicas == 4


def test_scaling_down_waits_for_finished_workers() -> None:
    world = running(replicas=4)
    world.edit(replicas=2)
    plan = world.step()
    assert of_kind(plan.actions, DeletePod) == []
    assert [action.desired.groups for action in of_kind(plan.actions, SetDesired)] == [{"cpu": 2}]
    assert plan.poll_s == world.defaults.fast_poll_s
    world.then.say(world.head, is_resizing=True)
    assert len(world.live()) == 4
    world.then.say(world.head, is_resizing=False)
    assert world.slots() == ["cpu-0", "cpu-1"]


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_scaling_down_waits_for_a_silent_head_no_longer_than_a_drain(*, is_taken_back: bool) -> None:
    world = running(replicas=2, runPolicy={"drainSeconds": 100, "progressDeadlineSeconds": 0})
    world.known.is_silent = True
    world.apply(replicas=1)
    assert [pod.retiring_since is None for pod in world.live()] == [True, False]
    if is_taken_back:
        world.apply(replicas=2)
        assert [pod.retiring_since for pod in world.live()] == [None, None]
    world.wait(100)
    assert len(world.live()) == 1 + is_taken_back


def test_no_worker_at_all_pauses_the_fleet() -> None:
    world = running()
    world.apply(replicas=0)
    assert (world.live(), world.condition("Paused")) == ([], "True/NoWorkers")
    world.edit(replicas=1)
    world.run()
    assert (len(world.live()), world.condition("Paused")) == (1, "False/NotPaused")


def test_paused_is_told_to_the_head_and_pods_stay() -> None:
    world = running()
    pods = set(world.pods)
    world.edit(paused=True)
    plan = world.step()
    assert [action.desired.paused for action in of_kind(plan.actions, SetDesired)] == [True]
    world.settle()
    assert (world.condition("Paused"), world.job.status.phase, set(world.pods)) == ("True/Spec", "Paused", pods)


def test_suspend_drains_and_resume_is_a_new_epoch() -> None:
    world = running()
    world.edit(suspend=True)
    plan = world.step()
    assert len(of_kind(plan.actions, DrainHead)) == 1
    assert of_kind(plan.actions, DeletePod) == []
    assert (world.condition("Suspended"), world.job.status.phase) == ("False/Suspending", "Suspending")
    world.settle()
    world.then.finish("pong-head-1", exit_code=143, message='{"frames": 1500}')
    world.wait(60)
    assert world.pods == {}
    assert (world.condition("Suspended"), world.job.status.start_time) == ("True/Suspended", None)
    assert world.job.status.frames.collected == 1500
    world.tick(10_000)
    assert not changes(world.plan())
    world.edit(suspend=False)
    world.run()
    assert (world.head.name, world.job.status.head_restarts) == ("pong-head-2", 0)
    assert world.condition("Suspended") == "False/NotSuspended"
    assert world.job.status.start_time == world.now


@pytest.mark.parametrize("is_ready", [True, False])
def test_draining_head_keeps_its_time_and_no_longer(*, is_ready: bool) -> None:
    world = running(runPolicy={"drainSeconds": 100})
    world.apply(suspend=True)
    if not is_ready:
        world.unready("pong-head-1")
    world.wait(99)
    plan = world.plan()
    assert (len(world.pods), plan.poll_s) == (3, world.defaults.fast_poll_s)
    assert all(not pod.is_terminating for pod in world.pods.values())
    world.then.say(world.head, frames=1700, settled=1600)
    assert (world.job.status.frames.collected, world.job.status.frames.settled) == (1700, 1600)
    world.wait(1)
    assert all(pod.is_terminating for pod in world.pods.values())


def test_unready_head_that_was_not_told_to_drain_yet_is_told() -> None:
    world = running()
    world.edit(suspend=True)
    world.step(crash_after=1)
    world.restart_operator()
    world.unready("pong-head-1")
    assert world.step().poll_s == world.defaults.fast_poll_s
    world.say(world.head)
    assert len(of_kind(world.step().actions, DrainHead)) == 1


def test_suspended_head_that_is_not_ready_has_nothing_to_drain() -> None:
    world = running()
    world.unready("pong-head-1")
    world.edit(suspend=True)
    assert {action.pod.name for action in of_kind(world.step().actions, DeletePod)} == set(world.pods)


def test_resuming_in_the_middle_does_not_call_the_drain_back() -> None:
    world = running()
    world.apply(suspend=True)
    world.apply(suspend=False)
    assert world.job.status.phase == "Suspending"
    world.finish("pong-head-1", exit_code=143)
    world.run()
    assert (world.head.name, len(world.live()), world.job.status.head_restarts) == ("pong-head-2", 2, 0)


def test_job_that_begins_suspended_has_no_pods() -> None:
    world = World(suspend=True)
    world.settle()
    assert (world.pods, world.children, world.condition("Suspended")) == ({}, {}, "True/Suspended")


# -- the end of jobs -------------------------------------------------------------------------------------------


def test_head_that_ends_with_0_completes_the_job_and_workers_go() -> None:
    world = running(runPolicy={"ttlSecondsAfterFinished": 86_400})
    world.finish("pong-head-1", exit_code=0)
    plan = world.step()
    assert plan.actions == (), "the end is written before anything is cleaned up"
    assert world.condition("Completed") == "True/AllFramesDelivered"
    world.settle()
    world.tick(60)
    assert set(world.pods) == {"pong-head-1"}
    assert (world.job.status.frames.collected, world.job.status.phase) == (100_000, "Completed")
    assert world.job.status.head_restarts == 0
    world.tick(86_339)
    assert not changes(world.plan())
    world.tick(1)
    assert world.plan().actions == (DeleteJob(),)


def test_finished_job_without_a_ttl_stays_as_it_is() -> None:
    world = running()
    world.then.finish("pong-head-1", exit_code=0)
    world.tick(10 * 365 * 86_400)
    plan = world.plan()
    assert (plan.actions, plan.due) == ((), None)
    for name in world.pods:
        world.vanish(name)
    world.edit(replicas=5)
    assert not changes(world.plan())


@pytest.mark.parametrize(("policy", "left"), [("None", 3), ("Workers", 1), ("All", 0)])
def test_clean_pod_policy(policy: str, left: int) -> None:
    world = running(runPolicy={"cleanPodPolicy": policy})
    world.then.finish("pong-head-1", exit_code=0)
    world.tick(60)
    assert len(world.pods) == left


def test_completion_that_nobody_saw_is_found_again() -> None:
    # The head had delivered everything and its pod was collected before the operator looked.
    world = running()
    world.then.collect(100_000)
    assert world.job.status.phase == "Completing"
    world.then.vanish("pong-head-1")
    command = next(a for a in world.done[::-1] if isinstance(a, CreatePod)).manifest["spec"]["containers"][0]["command"]
    assert command[command.index("--floor-frames") + 1] == "100000"
    world.start("pong-head-2")
    world.then.finish("pong-head-2", exit_code=0)
    assert world.condition("Completed") == "True/AllFramesDelivered"


# -- groups ----------------------------------------------------------------------------------------------------


def test_groups_are_sized_each_by_itself() -> None:
    world = running(workerGroups=[{"name": "cpu"}, {"name": "gpu", "device": "gpu", "replicas": 1}])
    assert world.slots() == ["cpu-0", "cpu-1", "gpu-0"]
    world.apply(workerGroups=[{"name": "cpu"}])
    world.tick(60)
    world.run()
    assert world.slots() == ["cpu-0", "cpu-1"]
    assert world.head.name == "pong-head-2", "a head reads the groups once, at its start"


def test_many_pods_are_created_in_portions() -> None:
    world = World(replicas=120)
    assert [len(of_kind(world.step().actions, CreatePod)) for _ in range(6)] == [0, 51, 50, 20, 0, 0]


@pytest.mark.parametrize(("limit", "going"), [(3, 3), ("5%", 2), ("1%", 1), ("100%", 40)])
def test_change_takes_away_a_number_or_a_share_of_workers(limit: object, going: int) -> None:
    world = running(replicas=40, runPolicy={"maxUnavailable": limit})
    world.edit(workerGroups=[{"name": "cpu", "template": {"metadata": {"labels": {"a": "b"}}}}])
    world.step()
    assert len(of_kind(world.step().actions, DeletePod)) == going


def test_budgets_guard_the_head_and_workers_where_it_is_asked_for() -> None:
    def budgets() -> list[str]:
        return sorted(name for kind, name in world.children if kind == "PodDisruptionBudget")

    world = running()
    assert budgets() == ["pong-head"]
    world.edit(runPolicy={"disruptionBudget": "All", "maxUnavailable": "50%"}, replicas=4)
    world.run()
    assert budgets() == ["pong-head", "pong-worker"]
    applied = {
        order.manifest["metadata"]["name"]: order.manifest["spec"]
        for order in of_kind(world.done, ApplyChild)
        if order.manifest["kind"] == "PodDisruptionBudget"
    }
    for role, least in (("head", 1), ("worker", 2)):
        assert applied[f"pong-{role}"] == {
            "minAvailable": least,
            "selector": {"matchLabels": {"cormorant.dev/job-uid": world.job.uid, "cormorant.dev/role": role}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
    world.apply(runPolicy={"disruptionBudget": "None"})
    assert (budgets(), len(world.live())) == ([], 4)
