"""Whatever happens in whatever order: no two live pods of a slot, no two live heads, frames never go back within an
epoch and settled ones never at all, and when it stops happening the world becomes what the manifest says, and stays so.

`World` checks pods after every order and counts at every write; the machine below adds the rest.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cormorant_operator.cache import PodIndex
from cormorant_operator.decide.plan import Action, CheckTemplate, CreatePod, CreateTokens, DeleteJob
from cormorant_operator.decide.reconcile import reconcile
from cormorant_operator.pods import Obstacle, Pod
from cormorant_testing.operator_world import World, changes, of_kind

POLICY = {"progressDeadlineSeconds": 300, "drainSeconds": 60, "maxHeadRestarts": 3, "maxRestartsPerSlot": 3}
BAD_IMAGE = "example/broken:1"
PICK = st.integers(0, 99)


def to_a_pod(
    happens: Callable[[World, str], object], *, which: Callable[[Pod], bool] = lambda pod: pod.is_scheduled
) -> Any:
    """A rule by which this happens to some such live pod."""

    def happened(self: Any, pick: int) -> None:
        if name := self._pick(pick, which):
            happens(self.world, name)

    happened.__name__ = happens.__name__
    return rule(pick=PICK)(happened)


def finds_no_node(world: World, name: str) -> None:
    world.block(name, Obstacle.UNSCHEDULABLE, "no node")


def edits(**changes: st.SearchStrategy[Any]) -> Any:
    """A rule that changes one field of the spec."""

    def edited(self: Any, **changed: Any) -> None:
        self.world.edit(**changed)

    edited.__name__ = f"edit_{next(iter(changes))}"
    return rule(**changes)(edited)


class AnyOrder(RuleBasedStateMachine):
    """One job, an operator that may die at any moment, a cluster that does as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(replicas=2, runPolicy=POLICY)
        self.world.bad_image = BAD_IMAGE
        self.old_plan: tuple[Action, ...] = ()

    @initialize(has_pod_groups=st.booleans())
    def cluster_may_serve_pod_groups(self, *, has_pod_groups: bool) -> None:
        self.world.defaults = replace(self.world.defaults, has_pod_groups=has_pod_groups)

    # -- the operator ------------------------------------------------------------------------------------------

    @rule()
    def reconcile(self) -> None:
        self.world.step()

    @rule(writes=st.integers(0, 12))
    def operator_dies_after_some_writes(self, writes: int) -> None:
        self.world.step(crash_after=writes)
        self.world.restart_operator()
        # Only a lease keeps an operator without state from acting beside one that has a plan.
        self.old_plan = ()

    @rule(count=st.integers(0, 3))
    def api_server_loses_every_action_and_takes_the_status(self, count: int) -> None:
        plan = self.world.plan()
        for action in plan.actions[:count]:
            self.world.do(action)
        self.world.write(plan)

    @precondition(lambda self: not self.old_plan)
    @rule()
    def second_operator_makes_a_plan(self) -> None:
        self.old_plan = self.world.plan().actions

    @rule(pick=PICK)
    def second_operator_is_late_for_a_pod_that_came_and_went(self, pick: int) -> None:
        self.old_plan = self.world.plan().actions
        self.world.step()
        made = [order.manifest["metadata"]["name"] for order in of_kind(self.old_plan, CreatePod)]
        if there := [name for name in made if name in self.world.pods]:
            self.world.vanish(there[pick % len(there)])
        self.world.step()
        self.second_operator_does_what_it_planned_earlier()

    @precondition(lambda self: self.old_plan)
    @rule()
    def second_operator_does_what_it_planned_earlier(self) -> None:
        for action in self.old_plan:
            # Its verdicts are its own; the job has another version by now, and is not deleted.
            if not isinstance(action, (CheckTemplate, CreateTokens, DeleteJob)):
                self.world.do(action)
        self.old_plan = ()

    # -- the cluster -------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 15, 61, 400, 700]))
    def time_passes(self, seconds: int) -> None:
        self.world.tick(seconds)

    pod_starts = to_a_pod(World.start, which=lambda pod: not pod.is_ready)
    pod_finds_no_node = to_a_pod(finds_no_node, which=lambda pod: not pod.is_scheduled)
    pod_turns_unready = to_a_pod(World.unready)
    pod_is_evicted = to_a_pod(World.evict)
    pod_is_deleted = to_a_pod(World.delete)
    pod_is_deleted_by_force = to_a_pod(World.vanish)
    pod_is_expelled_by_a_taint = to_a_pod(World.expel)
    node_is_lost = to_a_pod(World.lose)

    @rule(
        pick=PICK,
        code=st.sampled_from([0, 1, 2, 137, 143]),
        message=st.none() | st.integers(0, 90_000).map('{{"frames": {}}}'.format),
    )
    def container_dies(self, pick: int, code: int, message: str | None) -> None:
        if name := self._pick(pick):
            self.world.finish(name, exit_code=code, ran_s=float(pick * 10), message=message)

    @rule(key=st.sampled_from([("Service", "pong-head"), ("Service", "pong-api")]))
    def child_is_deleted(self, key: tuple[str, str]) -> None:
        if key in self.world.children:
            self.world.vanish(key[1], key[0])

    @rule(pods=st.sampled_from([None, 1, 3]))
    def quota_changes(self, pods: int | None) -> None:
        self.world.quota = pods

    # -- the head ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self._ready_head() is not None)
    @rule(frames=st.integers(0, 120_000), settled=st.integers(0, 120_000), silent=st.booleans())
    def head_answers_or_does_not(self, frames: int, settled: int, silent: bool) -> None:
        if silent:
            self.world.known.is_silent = True
        else:
            self.world.say(self.world.head, frames=frames, settled=min(frames, settled))

    # -- people ------------------------------------------------------------------------------------------------

    scale = edits(replicas=st.integers(0, 4))
    suspend_or_resume = edits(suspend=st.booleans())
    pause_or_resume = edits(paused=st.booleans())
    choose_for_pods_without_a_node = edits(
        runPolicy=st.sampled_from(["Wait", "ScaleToFit"]).map(lambda choice: {**POLICY, "onUnschedulable": choice})
    )
    change_the_image = edits(image=st.sampled_from(["example/cormorant:1", "example/cormorant:2", BAD_IMAGE]))
    change_the_template = edits(
        workerGroups=st.sampled_from(["1", "2"]).map(
            lambda cpu: [{"name": "cpu", "resources": {"requests": {"cpu": cpu}}}]
        )
    )

    # -- what always holds -------------------------------------------------------------------------------------

    @invariant()
    def never_more_live_workers_than_were_ever_wanted(self) -> None:
        assert len(self.world.live()) <= 4

    @invariant()
    def what_wants_nothing_wants_nothing_until_it_is_due(self) -> None:
        world = self.world
        plan = world.plan()
        if not changes(plan):
            due = min(
                (at for at in (plan.due, plan.counters_at) if at is not None), default=world.now + timedelta(days=30)
            )
            assert due > world.now.replace(microsecond=0), "it would be looked at for ever"
            later = world.plan(now=max(world.now, due - timedelta(seconds=1)))
            assert not changes(later), (later, due)

    @invariant()
    def calm_workers_hide_nothing(self) -> None:
        world, others = self.world, PodIndex()
        kept, fresh = world.record().pod_index, PodIndex(world.pods.values())
        assert (kept.others, kept.healthy, kept.restarts) == (fresh.others, fresh.healthy, fresh.restarts)
        others.pods = others.others = {pod.uid: pod for pod in world.pods.values()}
        plan, record = world.plan(), replace(world.record(), pod_index=others)
        full = reconcile(world.job, record, world.state(), world.now, defaults=world.defaults)
        assert sorted(map(repr, plan.actions)) == sorted(map(repr, full.actions))
        assert replace(plan, actions=()) == replace(full, actions=())

    @invariant()
    def what_is_over_stays_over(self) -> None:
        status = self.world.job.status
        assert not (self.world.condition("Completed") and self.world.condition("Failed"))
        assert (status.completion_time is not None) == self.world.job.is_over

    def teardown(self) -> None:
        """Nothing happens any more: the world becomes what the manifest says."""
        world = self.world
        world.quota, world.known.is_silent = None, False
        world.edit(image="example/cormorant:1")
        for _ in range(40):
            if world.is_deleted:
                break
            world.settle()
            if world.is_deleted or self._is_as_it_should_be():
                break
            world.tick(61)
            for pod in [pod for pod in world.pods.values() if pod.is_live and not pod.is_ready]:
                world.start(pod.name)
            if (head := self._ready_head()) is not None:
                world.say(head, frames=min(99_999, world.job.status.frames.collected + 1))
        else:
            raise AssertionError(f"never as it should be: {world.job.status} {world.pods}")
        if not world.is_deleted:
            assert not changes(world.plan()), "a world that is as it should be wants nothing"

    def _is_as_it_should_be(self) -> bool:
        world = self.world
        live = [pod for pod in world.pods.values() if pod.is_live]
        if world.job.is_over:
            return not world.live()
        if world.job.spec.suspend:
            left = [pod for pod in world.pods.values() if pod.node not in world.lost_nodes]
            return not left and world.condition("Suspended") == "True/Suspended"
        wanted = [f"cpu-{index}" for index in range(world.job.spec.replicas)]
        return (
            world.slots() == wanted
            and all(pod.is_ready for pod in live)
            and len(live) == len(wanted) + 1
            and {pod.base_image for pod in live} == {"example/cormorant:1"}
        )

    def _pick(self, number: int, which: Callable[[Pod], bool] = lambda pod: pod.is_scheduled) -> str:
        live = sorted(pod.name for pod in self.world.pods.values() if pod.is_live and which(pod))
        return live[number % len(live)] if live else ""

    def _ready_head(self) -> object:
        return next((pod for pod in self.world.pods.values() if pod.role == "head" and pod.is_ready), None)


FEW = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    # Shrinking takes minutes; the steps of a failure are printed in any case.
    phases=[phase for phase in Phase if phase is not Phase.shrink],
)
TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = FEW


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_more_orders() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(FEW, max_examples=2500))
