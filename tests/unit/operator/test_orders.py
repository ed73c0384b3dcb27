"""Sizes, pauses and suspension that a user orders, the ends of jobs, and sizes chosen by autoscaling."""

import random
from datetime import datetime, timedelta
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cormorant_contract.workers import Autoscale
from cormorant_operator.decide.plan import CreatePod, Delete, DeleteJob, DrainHead, SetDesired
from cormorant_operator.decide.view import autoscaled
from cormorant_operator.job_state import HeadAnswer, JobState, Waits
from cormorant_operator.pods import Obstacle
from cormorant_testing.operator_world import BEGIN, World, changes, of_kind, running

# -- orders of people ------------------------------------------------------------------------------------------


def test_scaling_down_waits_for_finished_workers() -> None:
    world = running(replicas=4)
    world.edit(replicas=2)
    plan = world.step()
    assert of_kind(plan.actions, Delete) == []
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


def test_suspend_drains_and_resume_is_a_new_epoch() -> None:
    world = running()
    world.edit(suspend=True)
    plan = world.step()
    assert len(of_kind(plan.actions, DrainHead)) == 1
    assert of_kind(plan.actions, Delete) == []
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


@pytest.mark.parametrize(("is_ready", "is_resumed"), [(True, False), (False, False), (True, True)])
def test_draining_head_keeps_its_time_and_no_longer(*, is_ready: bool, is_resumed: bool) -> None:
    world = running(runPolicy={"drainSeconds": 100})
    world.apply(suspend=True)
    if not is_ready:
        world.unready("pong-head-1")
    world.apply(suspend=not is_resumed)
    world.wait(99)
    plan = world.plan()
    assert (world.job.status.phase, len(world.pods), plan.poll_s) == ("Suspending", 3, world.defaults.fast_poll_s)
    assert all(not pod.is_terminating for pod in world.pods.values())
    world.then.say(world.head, frames=1700, settled=1600)
    assert (world.job.status.frames.collected, world.job.status.frames.settled) == (1700, 1600)
    world.wait(1)
    ends = {(pod.role, pod.is_terminating) for pod in world.pods.values()}
    assert ends == {("head", True), ("worker", not is_resumed)}
    if is_resumed:
        world.tick(60)
        world.run()
        assert (world.head.name, len(world.live()), world.job.status.head_restarts) == ("pong-head-2", 2, 0)


def test_suspended_head_that_is_not_ready_has_nothing_to_drain() -> None:
    world = running()
    world.unready("pong-head-1")
    world.edit(suspend=True)
    assert {action.name for action in of_kind(world.step().actions, Delete)} == set(world.pods)


def test_job_that_begins_suspended_has_no_pods() -> None:
    world = World(suspend=True)
    world.settle()
    assert (world.pods, world.children, world.condition("Suspended")) == ({}, {}, "True/Suspended")


# -- the end of jobs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "has_sidecar", "left"),
    [("Workers", False, 1), ("Workers", True, 0), ("None", False, 3), ("All", False, 0)],
)
def test_head_that_ends_with_0_completes_the_job_and_workers_go(policy: str, has_sidecar: bool, left: int) -> None:
    world = running(runPolicy={"cleanPodPolicy": policy, "ttlSecondsAfterFinished": 86_400})
    world.finish("pong-head-1", exit_code=0, has_sidecar=has_sidecar)
    assert world.step().actions == (), "the end is written before anything is cleaned up"
    assert world.condition("Completed") == "True/AllFramesDelivered"
    world.settle()
    world.tick(60)
    assert len(world.pods) == left
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
    assert (plan.actions, plan.due, plan.poll_s) == ((), None, None)
    for name in world.pods:
        world.vanish(name)
    world.edit(replicas=5)
    assert not changes(world.plan())


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


def test_many_pods_are_created_in_portions() -> None:
    world = World(replicas=120)
    assert [len(of_kind(world.step().actions, CreatePod)) for _ in range(6)] == [0, 51, 50, 20, 0, 0]


@pytest.mark.parametrize(("limit", "going"), [(3, 3), ("5%", 2), ("1%", 1), ("100%", 40)])
def test_change_takes_away_a_number_or_a_share_of_workers(limit: object, going: int) -> None:
    world = running(replicas=40, runPolicy={"maxUnavailable": limit})
    world.edit(workerGroups=[{"name": "cpu", "template": {"metadata": {"labels": {"a": "b"}}}}])
    world.step()
    assert len(of_kind(world.step().actions, Delete)) == going


def test_budgets_guard_the_head_and_workers_where_it_is_asked_for() -> None:
    def budgets() -> dict[str, Any]:
        return {name: raw["spec"] for (kind, name), raw in world.api.stored.items() if kind == "PodDisruptionBudget"}

    def budget(role: str, least: int) -> dict[str, Any]:
        labels = {"cormorant.dev/job-uid": world.job.uid, "cormorant.dev/role": role}
        selector = {"matchLabels": labels}
        return {"minAvailable": least, "selector": selector, "unhealthyPodEvictionPolicy": "AlwaysAllow"}

    world = running()
    assert budgets() == {"pong-head": budget("head", 1)}
    world.edit(runPolicy={"disruptionBudget": "All", "maxUnavailable": "50%"}, replicas=4)
    world.run()
    assert budgets() == {"pong-head": budget("head", 1), "pong-worker": budget("worker", 2)}
    world.apply(runPolicy={"disruptionBudget": "None"})
    assert (budgets(), len(world.live())) == ({}, 4)


# -- sizes of groups that follow who waits for whom, and what finds a node ---------------------------------------


def waits_of(size: int, consumer_s: float, idle_s: float, worker_s: float) -> Waits:
    return Waits(consumer_s=consumer_s, idle_s={"cpu": idle_s}, worker_s={"cpu": worker_s}, sizes={"cpu": size})


def observed(seconds: float, *, size: int, consumer: float, idle: float) -> list[tuple[datetime, Waits]]:
    """A period in which learners waited for a share of the time, and workers were idle for one."""
    worker_s = size * seconds
    last = waits_of(size, consumer * seconds, idle * worker_s, worker_s)
    return [(BEGIN, waits_of(size, 0.0, 0.0, 0.0)), (BEGIN + timedelta(seconds=seconds), last)]


class Job:
    """A fleet whose learners could use the frames of `demand` workers, seen every 15 s."""

    def __init__(self, *, size: int, most: int, seed: int = 0, noise: float = 0.0) -> None:
        self.scale = Autoscale(min_replicas=1, max_replicas=most)
        self.size = self.ready = size
        self.state = JobState()
        self.now = BEGIN
        self.sizes = [size]
        self._consumer_s = self._idle_s = self._worker_s = 0.0
        self._random, self._noise = random.Random(seed), noise

    def run(self, demand: float, *, minutes: float) -> None:
        for _ in range(round(minutes * 4)):
            now_wanted = demand * (1 + self._random.uniform(-self._noise, self._noise))
            self._consumer_s += 15.0 * max(0.0, 1 - self.ready / now_wanted)
            self._worker_s += 15.0 * self.ready
            self._idle_s += 15.0 * max(0.0, self.ready - now_wanted)
            self.now += timedelta(seconds=15)
            is_measured = self.ready == self.size
            waits = waits_of(self.size, self._consumer_s, self._idle_s, self._worker_s) if is_measured else None
            answer = HeadAnswer(pod_uid="head-1", phase="Running", frames=0, waits=waits)
            self.state.record_answer(answer, at=self.now, max_gap_s=60)
            # Pods take a look's time to start or to end.
            self.ready = self.size
            self.size = autoscaled(self.scale, self.size, self.state.waits, group="cpu")
            if self.size != self.ready:
                self.sizes.append(self.size)


@given(
    demand=st.floats(0.1, 40),
    size=st.integers(1, 40),
    noise=st.sampled_from([0.0, 0.02, 0.05]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_settles_at_what_learners_need(demand: float, size: int, noise: float, seed: int) -> None:
    job = Job(size=size, most=32, seed=seed, noise=noise)
    job.run(demand, minutes=60)
    # Learners wait a fifth of the time at most, unless the bound is reached; workers idle for a quarter, and one more.
    assert job.size >= min(32, demand * 0.8 * (1 - noise))
    assert job.size <= max(1, demand / 0.75 * (1 + noise) + 1)
    settled = len(job.sizes)
    job.run(demand, minutes=60)
    # Noise beside a threshold may take one more step, and no demand a step back.
    assert len(job.sizes) <= settled + (noise > 0), job.sizes
    steps = [b - a for a, b in zip(job.sizes, job.sizes[1:], strict=False)]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps), job.sizes
    assert len(steps) <= 8


def test_on_policy_learners_change_nothing() -> None:
    # Learners wait while workers collect, and workers wait while learners learn: more workers would not be wrong, but
    # how many is not to be seen.
    both = observed(120, size=2, consumer=0.5, idle=0.5)
    assert autoscaled(Autoscale(max_replicas=8), 2, both, group="cpu") == 2


@pytest.mark.parametrize(
    ("gap_s", "before", "after", "is_known"),
    [
        pytest.param(40, {}, {"pod_uid": "head-2"}, False, id="another head"),
        pytest.param(40, {}, {"size": 3}, True, id="another size"),
        pytest.param(40, {"waits": None}, {}, True, id="resizing"),
        pytest.param(60.5, {}, {}, False, id="a gap between answers"),
    ],
)
def test_evidence_is_of_one_head_and_one_size(
    gap_s: float, before: dict[str, Any], after: dict[str, Any], *, is_known: bool
) -> None:
    state, later = JobState(), BEGIN + timedelta(seconds=60 + gap_s)
    for at, said in ((BEGIN, {}), (BEGIN + timedelta(seconds=60), before), (later, after)):
        state.is_silent = state.is_token_refused = True
        (_, (_, waits)) = observed(1, size=said.get("size", 2), consumer=1.0, idle=0.0)
        uid = said.get("pod_uid", "head-1")
        answer = HeadAnswer(pod_uid=uid, phase="Running", frames=0, waits=said.get("waits", waits))
        state.record_answer(answer, at=at, max_gap_s=60)
    assert (state.is_silent, state.is_token_refused) == (False, False)
    assert len(state.waits) == 1, "what was before says nothing"
    assert state.answering_since == (BEGIN if is_known else later)


def test_pods_follow() -> None:
    group = {"name": "cpu", "autoscale": {"minReplicas": 1, "maxReplicas": 5}}
    world = World(workerGroups=[group], replicas=2)
    world.run()
    world.known.waits = observed(30, size=2, consumer=0.5, idle=0.0)
    world.settle()
    # Once: what was measured with 2 workers says nothing of 4.
    assert world.slots() == ["cpu-0", "cpu-1", "cpu-2", "cpu-3"]
    assert world.told[-1] == "Scaled"
    world.run()
    assert world.job.status.workers == "4/4"
    assert world.known.answer.sizes == {"cpu": 4}
    world.restart_operator()
    world.run()
    assert len(world.live()) == 4, "another operator keeps the size"
    world.say(world.head, sizes={"cpu": 4})
    world.known.waits, world.known.is_silent = observed(120, size=4, consumer=0.0, idle=0.6), True
    world.settle()
    assert len(world.live()) == 4, "a silent head changes nothing"
    world.known.is_silent = False
    world.run()
    assert world.job.status.groups[0].desired == 2
    world.edit(workerGroups=[{**group, "autoscale": {"minReplicas": 3, "maxReplicas": 5}}])
    world.run()
    assert len(world.live()) == 3, "bounds that change rule"


@settings(max_examples=30)
@given(size=st.integers(1, 6), late=st.sets(st.integers(0, 5)), fewest=st.integers(1, 3), fewer=st.integers(1, 6))
def test_every_slot_but_those_that_wait_is_counted_on(size: int, late: set[int], fewest: int, fewer: int) -> None:
    fewest = min(fewest, size)
    world = World(
        replicas=size,
        workerGroups=[{"name": "cpu", "minReplicas": fewest}],
        runPolicy={"onUnschedulable": "ScaleToFit", "unschedulableAfterSeconds": 600, "progressDeadlineSeconds": 0},
    )
    world.settle()
    world.start("pong-head-1")
    late &= set(range(size))
    for pod in world.live():
        if pod.index in late:
            world.block(pod.name, Obstacle.UNSCHEDULABLE, "0/3 nodes are available")
        else:
            world.start(pod.name)
    world.settle()
    assert counted_on(world) == set(range(size)), "a wait that is not late yet changes nothing"
    world.wait(600)
    fitting = set(range(size)) - late
    is_enough = len(fitting) >= fewest
    assert counted_on(world) == (fitting if is_enough else set(range(size)))
    assert len(world.live()) == size, "pods that wait keep their place in the queue"
    # A pod beyond a smaller size goes only after the head was told not to count on its slot.
    world.edit(replicas=max(fewest, min(size, fewer)))
    for _ in range(4):
        ready = {pod.name: pod.index for pod in world.live() if pod.is_ready}
        let_go = {ready[order.name] for order in of_kind(world.plan().actions, Delete) if order.name in ready}
        assert not let_go & counted_on(world)
        world.step()
    world.apply(replicas=size)
    world.then.start_all()
    assert counted_on(world) == set(range(size))
    assert not world.known.answer.empty_slots


def counted_on(world: World) -> set[int]:
    """Slots that the head fills, as it reads what it was told last."""
    answer = world.known.answer
    skipped = answer.empty_slots.get("cpu", ())
    return set(islice((index for index in count() if index not in skipped), answer.sizes["cpu"]))
