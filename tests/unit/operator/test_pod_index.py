"""Pods that are kept one by one are those that are read at once, and healthy ones hide nothing."""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cormorant_operator.decide.plan import CreatePod, DeletePod
from cormorant_operator.decide.reconcile import reconcile
from cormorant_operator.decide.view import View
from cormorant_operator.pods import Pod, PodIndex
from cormorant_testing.cost import lines_run
from cormorant_testing.operator_world import BEGIN, World, of_kind, running

PODS = st.builds(
    lambda number, role, group, index, attempt, changes: Pod(
        name=f"p{number}",
        uid=f"u{number}",
        role=role,
        created=BEGIN,
        group=group if role == "worker" else "",
        index=index,
        attempt=attempt,
        epoch=attempt,
        **changes,
    ),
    number=st.integers(0, 11),
    role=st.sampled_from(("worker", "worker", "worker", "head")),
    group=st.sampled_from(("cpu", "gpu")),
    index=st.integers(0, 3),
    attempt=st.integers(0, 2),
    changes=st.sampled_from(
        (
            {"phase": "Running", "is_scheduled": True, "ready_since": BEGIN},
            {"phase": "Running", "is_scheduled": True, "ready_since": BEGIN, "template": "t2"},
            {"phase": "Running", "is_scheduled": True, "ready_since": BEGIN, "restarts": 3},
            {"phase": "Running", "is_scheduled": True, "ready_since": BEGIN, "failures": 1, "restarts": 1},
            {"phase": "Running", "is_scheduled": True, "ready_since": BEGIN, "retiring_since": BEGIN},
            {"phase": "Running", "is_scheduled": True, "deletion_deadline": BEGIN, "ready_since": BEGIN},
            {"phase": "Failed", "is_scheduled": True},
            {},
        )
    ),
)
EVENTS = st.lists(st.one_of(PODS, st.integers(0, 11)), max_size=40)
"""Pods that came or changed, and numbers of those that went."""


def content(pod_index: PodIndex) -> Any:
    return (
        pod_index.pods,
        pod_index.others,
        pod_index.healthy,
        {build: pod_index.restarts[build] for build in pod_index.healthy},
    )


@given(EVENTS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_roster_kept_by_events_is_the_one_made_of_all_pods(events: list[Pod | int]) -> None:
    kept = PodIndex()
    for event in events:
        if isinstance(event, Pod):
            kept.put(event)
        else:
            kept.drop(f"u{event}")
        assert content(kept) == content(PodIndex(kept.pods.values()))


def large(workers: int) -> World:
    """A job of very many workers that collect."""
    world = running(replicas=1)
    (one,) = world.live()
    world.edit(replicas=workers)
    record = world.record()
    record.pod_index.drop(one.uid)
    for index in range(workers):
        record.pod_index.put(replace(one, name=f"w{index}", uid=f"w{index}", index=index, created=world.now))
    record.attempts = {("cpu", index): 0 for index in range(workers)}
    world.then.say(world.head, sizes={"cpu": workers})
    return world


def test_one_changed_pod_of_5000_is_all_that_is_looked_at() -> None:
    world = large(5000)
    record, state = world.record(), world.state()
    changed = replace(world.pods["w7"], phase="Failed", exit_code=1, ended=world.now, ready_since=None)
    record.pod_index.put(changed)

    view = View(world.job, record, state, world.now, world.defaults)
    assert [pod.name for pod in view.examined] == [world.head.name, "w7"]
    assert [slot.index for slot in view.slots["cpu"]] == [7]
    assert view.ready("cpu") == 4999
    decided = []

    def decide() -> None:
        decided.append(reconcile(world.job, record, state, world.now, defaults=world.defaults))

    assert lines_run(decide) < 8000, "5,100, however many pods there are: one look at each would be as many again"
    (created,) = decided[0].actions
    assert isinstance(created, CreatePod)
    assert created.manifest["metadata"]["labels"]["cormorant.dev/index"] == "7"


@pytest.mark.slow
def test_2000_workers_roll_in_minutes_with_100_at_a_time() -> None:
    """Pods end in 5 s, are made at 50 a second and are ready after 15 s; the operator looks once a second."""
    world = large(2000)
    world.edit(
        workerGroups=[{"name": "cpu", "resources": {"requests": {"cpu": "2"}}}], runPolicy={"maxUnavailable": 100}
    )
    old, pod_index = world.live()[0].template, world.record().pod_index
    began, cpu_s, looks, most_away = world.now, 0.0, 0, 0
    requests_left = 0.0
    while any(build.template == old for build in pod_index.healthy) or len(pod_index.others) > 1:
        world.now += timedelta(seconds=1)
        requests_left = min(100.0, requests_left + 50)
        for pod in list(pod_index.others.values()):
            if pod.deletion_deadline is not None and world.now >= pod.deletion_deadline:
                pod_index.drop(pod.uid)
            elif pod.is_live and not pod.is_ready and world.now >= pod.created + timedelta(seconds=15):
                pod_index.put(replace(pod, phase="Running", is_scheduled=True, ready_since=world.now))
        at = time.process_time()
        plan = world.plan()
        cpu_s, looks = cpu_s + time.process_time() - at, looks + 1
        for action in plan.actions:
            if requests_left < 1:
                break
            requests_left -= 1
            if isinstance(action, DeletePod):
                ending = replace(action.pod, deletion_deadline=world.now + timedelta(seconds=5), ready_since=None)
                pod_index.put(ending)
            else:
                world.do(action)
        world.write(plan)
        most_away = max(most_away, 2000 - sum(len(pods) for pods in pod_index.healthy.values()))
        assert world.now - began < timedelta(minutes=15), "it does not come to an end"
    assert most_away <= 100
    assert world.now - began < timedelta(minutes=10)
    assert cpu_s / looks < 0.05
    assert not of_kind(plan.actions, DeletePod)
