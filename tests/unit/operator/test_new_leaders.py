"""A leader that comes after any absence, to a status of any age: nothing ends, stalls or goes before it has heard."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from cormorant_contract.status import CollectorJobStatus
from cormorant_operator.decide.plan import CreatePod, DeletePod
from cormorant_operator.job_state import HeadAnswer, HeadState, JobState, is_cut_off
from cormorant_testing.operator_world import BEGIN, World, changes, of_kind, running

POLICY = {
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
    world, statuses = World(runPolicy=POLICY), []
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
        reasons = {order.why for order in of_kind(plan.actions, DeletePod)}
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
    world.then.restart_operator()
    assert world.head.draining_since is not None
    world.wait(59)
    assert not world.head.is_terminating


# -- what an operator knows of heads first-hand -----------------------------------------------------------------------


def test_head_is_known_from_its_first_answer_on_but_for_a_gap_or_another_head() -> None:
    state, heard = JobState(), []
    for at_s, uid in ((5, "u1"), (20, "u1"), (80, "u1"), (140.5, "u1"), (150, "u2")):
        state.is_silent = state.is_token_refused = True
        answer = HeadAnswer(pod_uid=uid, phase="Running", frames=10)
        state.record_answer(answer, at=BEGIN + timedelta(seconds=at_s), max_gap_s=60)
        assert (state.is_silent, state.is_token_refused) == (False, False)
        heard.append((state.answering_since - BEGIN).total_seconds())
    assert heard == [5, 5, 5, 140.5, 150]


@pytest.mark.parametrize(
    ("heads", "is_fault"),
    [
        pytest.param({"silent": 2}, False, id="few heads prove nothing"),
        pytest.param({"silent": 3, "answering": 3}, False, id="half of them answer"),
        pytest.param({"silent": 4, "answering": 2}, True, id="most are silent"),
        pytest.param({"silent": 3, "refusing": 4}, False, id="they answer: no"),
    ],
)
def test_most_heads_silent_at_once_is_a_fault_of_the_operator(heads: dict[HeadState, int], is_fault: bool) -> None:
    assert is_cut_off(Counter(heads)) == is_fault
