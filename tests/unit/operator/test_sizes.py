"""Sizes of groups: autoscaled ones follow who waits for whom; ScaleToFit leaves out slots that find no node."""

import random
from datetime import datetime, timedelta
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cormorant_contract.workers import Autoscale
from cormorant_operator.decide.plan import DeletePod
from cormorant_operator.decide.view import autoscaled
from cormorant_operator.job_state import HeadAnswer, JobState, Waits
from cormorant_operator.pods import Obstacle
from cormorant_testing.operator_world import BEGIN, World, of_kind


def observed(seconds: float, *, size: int, consumer: float, idle: float) -> list[tuple[datetime, Waits]]:
    """A period in which learners waited for a share of the time, and workers were idle for one."""

    def after(s: float) -> Waits:
        worker_s = size * s
        return Waits(
            consumer_s=consumer * s, idle_s={"cpu": idle * worker_s}, worker_s={"cpu": worker_s}, sizes={"cpu": size}
        )

    return [(BEGIN + timedelta(seconds=s), after(s)) for s in (0.0, seconds)]


LEARNERS_WAIT = observed(30, size=2, consumer=0.5, idle=0.0)


def idle(size: int) -> list[tuple[datetime, Waits]]:
    return observed(120, size=size, consumer=0.0, idle=0.6)


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
            waits = Waits(
                consumer_s=self._consumer_s,
                idle_s={"cpu": self._idle_s},
                worker_s={"cpu": self._worker_s},
                sizes={"cpu": self.size},
            )
            is_measured = self.ready == self.size
            answer = HeadAnswer(pod_uid="head-1", phase="Running", frames=0, waits=waits if is_measured else None)
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
    ("gap_s", "before", "after"),
    [
        pytest.param(40, {}, {"pod_uid": "head-2"}, id="another head"),
        pytest.param(40, {}, {"size": 3}, id="another size"),
        pytest.param(40, {"waits": None}, {}, id="resizing"),
        pytest.param(300, {}, {}, id="a gap between answers"),
    ],
)
def test_evidence_is_of_one_head_and_one_size(gap_s: int, before: dict[str, Any], after: dict[str, Any]) -> None:
    state = JobState()
    for at, changes in ((0, before), (gap_s, after)):
        (_, (_, waits)) = observed(at, size=changes.get("size", 2), consumer=1.0, idle=0.0)
        answer = HeadAnswer(
            pod_uid=changes.get("pod_uid", "head-1"), phase="Running", frames=0, waits=changes.get("waits", waits)
        )
        state.record_answer(answer, at=BEGIN + timedelta(seconds=at), max_gap_s=60)
    assert len(state.waits) == 1, "what was before says nothing"


def test_pods_follow() -> None:
    group = {"name": "cpu", "autoscale": {"minReplicas": 1, "maxReplicas": 5}}
    world = World(workerGroups=[group], replicas=2)
    world.run()
    world.known.waits = LEARNERS_WAIT
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
    world.known.waits, world.known.is_silent = idle(4), True
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
        let_go = {order.pod.index for order in of_kind(world.plan().actions, DeletePod) if order.pod.is_ready}
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
