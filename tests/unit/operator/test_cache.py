"""What the operator has seen, however late and in whatever order it is told; healthy pods hide nothing."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from cormorant_contract.children import ATTEMPT, EPOCH, GROUP, INDEX, ROLE
from cormorant_operator.cache import Cache
from cormorant_operator.decide.plan import CreatePod, Delete
from cormorant_operator.decide.reconcile import reconcile
from cormorant_operator.decide.view import View
from cormorant_operator.job import Job
from cormorant_testing.cost import lines_run
from cormorant_testing.operator_world import World, make_spec, of_kind, running
from manifest_making import collector_job


def job(*, version: int = 1, uid: str = "j1", **spec: Any) -> dict[str, Any]:
    return collector_job("pong", make_spec(**spec), namespace="a", uid=uid, resourceVersion=str(version))


def pod(
    *, version: int = 2, uid: str = "p1", owner: str = "j1", phase: str = "Pending", attempt: int = 0
) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "name": "pong-cpu-0-x",
            "namespace": "a",
            "uid": uid,
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {ROLE: "worker", GROUP: "cpu", INDEX: "3", ATTEMPT: str(attempt)},
            "ownerReferences": [{"uid": owner, "controller": True}] if owner else [],
        },
        "status": {"phase": phase},
    }


def test_news_name_the_job_and_old_news_nobody() -> None:
    cache = Cache()
    assert cache.see(job(version=5)) == "j1"
    assert cache.see(job(version=5)) == ""
    assert cache.see(job(version=4, replicas=9)) == ""
    found = cache.job("j1")
    assert isinstance(found, Job)
    assert found.spec.replicas == 2
    assert cache.see(pod(version=9)) == "j1"
    assert cache.see(pod(version=10, phase="Running")) == "j1", "versions are compared as numbers"
    assert cache.see(pod(version=9)) == ""
    assert [p.phase for p in cache.record("j1").pods] == ["Running"]


def test_deleted_objects_stay_forgotten_despite_late_answers() -> None:
    cache = Cache()
    cache.see(job())
    cache.see(pod())
    assert cache.see(pod(version=5), is_deleted=True) == "j1"
    assert cache.see(pod(version=4)) == ""
    assert cache.record("j1").pods == ()
    cache.see(pod(uid="p2"))
    cache.see(job(version=3), is_deleted=True)
    assert cache.jobs() == []
    cache.see(pod(version=4, uid="p2"), is_deleted=True)
    assert cache._records == {}


def test_pods_before_without_and_of_another_job_are_kept_apart() -> None:
    cache = Cache()
    cache.see(pod())
    assert (cache.job("j1"), cache.jobs()) == (None, [])
    cache.see(job())
    cache.see(job(uid="j2", version=8))  # made again under its name
    cache.see(pod(uid="p2", owner="j2"))
    assert [len(cache.record(uid).pods) for uid in ("j1", "j2")] == [1, 1]
    assert cache.see(pod(version=9, owner="")) == "j1"
    assert cache.record("j1").pods == ()


def test_complete_list_buries_what_a_broken_watch_never_told_of() -> None:
    cache = Cache()
    cache.see(job(version=1))
    cache.see(pod(version=2))
    cache.see(pod(version=9, uid="newer"))
    assert cache.prune("Pod", [], version="5", namespace="another") == set()
    assert cache.prune("Pod", [], version="5") == {"j1"}
    assert [p.uid for p in cache.record("j1").pods] == ["newer"], "what came after the list stays"
    assert cache.prune("CollectorJob", [], version="5") == {"j1"}
    assert cache.job("j1") is None


def test_attempts_and_epochs_of_vanished_and_unseen_pods_are_remembered() -> None:
    cache = Cache()
    cache.see(job())
    assert (cache.record("j1").attempts, cache.is_past(pod(attempt=0))) == ({}, False)
    cache.see(pod(attempt=4))
    cache.see(pod(attempt=4, version=3), is_deleted=True)
    assert cache.record("j1").attempts == {("cpu", 3): 4}
    cache.see(pod(attempt=6, uid="never-seen", version=9), is_deleted=True)
    cache.see(pod(attempt=5, uid="late", version=5))
    assert cache.record("j1").attempts == {("cpu", 3): 6}
    assert [cache.is_past(pod(attempt=attempt)) for attempt in (0, 6, 7)] == [True, True, False]
    assert not cache.is_past(pod(owner="j2", attempt=0)), "another job of that name"
    head = pod(uid="h")
    head["metadata"]["labels"] = {ROLE: "head", EPOCH: "2"}
    cache.see(head)
    cache.see(head, is_deleted=True)
    assert (cache.record("j1").epoch, cache.is_past(head)) == (2, True)


def test_job_that_left_a_shard_and_comes_back_still_has_its_pods() -> None:
    cache = Cache()
    cache.see(job(version=3))
    cache.see(pod(version=4, attempt=2))
    # To a watch with a selector, a job whose labels no longer match is deleted.
    assert cache.see(job(version=5), is_deleted=True) == "j1"
    assert cache.jobs() == []
    assert cache.see(pod(version=6, uid="p2", attempt=3)) == "j1"
    assert cache.see(job(version=4)) == ""
    assert cache.see(job(version=8)) == "j1"
    assert [p.attempt for p in cache.record("j1").pods] == [2, 3]
    assert cache.record("j1").attempts == {("cpu", 3): 3}


def large(workers: int) -> World:
    """A job of very many workers that collect."""
    world = running(replicas=1)
    (one,) = world.live()
    world.edit(replicas=workers)
    record = world.record()
    record.pod_index.drop(one.uid)
    for index in range(workers):
        record.pod_index.put(
            replace(one, name=f"w{index}", uid=f"w{index}", index=index, restarts=1, created=world.now)
        )
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
    assert (view.ready("cpu"), view.restarts("cpu")) == (4999, 5001)
    decided = []

    def decide() -> None:
        decided.append(reconcile(world.job, record, state, world.now, defaults=world.defaults))

    assert lines_run(decide) < 8000, "5,100, however many pods there are: one look at each would be as many again"
    (created,) = decided[0].actions
    assert isinstance(created, CreatePod)
    assert created.manifest["metadata"]["labels"]["cormorant.dev/index"] == "7"


@pytest.mark.slow
def test_2000_workers_roll_in_minutes_with_100_at_a_time() -> None:
    """Pods end in 5 s and are ready after 15 s; the operator looks once a second."""
    world = large(2000)
    world.edit(
        workerGroups=[{"name": "cpu", "resources": {"requests": {"cpu": "2"}}}], runPolicy={"maxUnavailable": 100}
    )
    old, pod_index = world.live()[0].template, world.record().pod_index
    began, looks, most_away = world.now, 0, 0
    costs = list[int]()
    while any(build.template == old for build in pod_index.healthy) or len(pod_index.others) > 1:
        world.now += timedelta(seconds=1)
        for pod in list(pod_index.others.values()):
            if pod.deletion_deadline is not None and world.now >= pod.deletion_deadline:
                pod_index.drop(pod.uid)
            elif pod.is_live and not pod.is_ready and world.now >= pod.created + timedelta(seconds=15):
                pod_index.put(replace(pod, phase="Running", is_scheduled=True, ready_since=world.now))
        plan, looks = world.plan(), looks + 1
        if looks % 40 == 0:
            costs.append(lines_run(world.plan))
        for action in plan.actions:
            if isinstance(action, Delete):
                ending = replace(
                    pod_index.pods[action.uid], deletion_deadline=world.now + timedelta(seconds=5), ready_since=None
                )
                pod_index.put(ending)
            else:
                world.do(action)
        world.write(plan)
        most_away = max(most_away, 2000 - sum(len(pods) for pods in pod_index.healthy.values()))
        assert world.now - began < timedelta(minutes=15), "it does not come to an end"
    assert most_away <= 100
    assert world.now - began < timedelta(minutes=10)
    assert max(costs) < 50_000, "25,400: the 100 that are away are looked at, not all 2000"
    assert not of_kind(plan.actions, Delete)
