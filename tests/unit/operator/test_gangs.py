"""PodGroups: the head and the fewest workers are bound to nodes together, and no later pod waits for another."""

from typing import Any

import pytest

from cormorant_operator.decide.plan import ApplyChild, CreatePod
from cormorant_operator.settings import OperatorDefaults
from cormorant_testing.operator_world import World, of_kind

SERVED = OperatorDefaults(has_pod_groups=True)
OF_TWO = [{"name": "cpu", "minReplicas": 2}]


def made(**spec: Any) -> World:
    """A job whose pods have no node yet."""
    world = World(defaults=SERVED, **{"workerGroups": OF_TWO} | spec)
    world.settle()
    return world


def applied(world: World) -> list[dict[str, Any]]:
    """The PodGroups that the operator wrote, in order."""
    return [order.manifest for order in of_kind(world.done, ApplyChild) if order.manifest["kind"] == "PodGroup"]


def counts(world: World) -> list[int]:
    """What they required."""
    return [group["spec"]["schedulingPolicy"]["gang"]["minCount"] for group in applied(world)]


def groups(world: World) -> list[str]:
    """Those that exist."""
    return sorted(name for kind, name in world.children if kind == "PodGroup")


def gangs(world: World) -> list[str]:
    """The group of every pod that was created since the last call; empty where it names none."""
    pods = [order.manifest["spec"] for order in of_kind(world.done, CreatePod)]
    world.done.clear()
    return [pod.get("schedulingGroup", {}).get("podGroupName", "") for pod in pods]


def test_head_and_fewest_workers_start_together_and_later_pods_alone() -> None:
    world = made(replicas=3)
    (name,) = groups(world)
    assert applied(world)[0]["metadata"]["ownerReferences"][0]["uid"] == world.job.uid
    assert counts(world) == [3]
    assert gangs(world) == [name] * 4
    world.run()
    assert counts(world) == [1], "a fourth pod that is still in the group waits for none"
    world.finish(world.head.name)
    world.vanish(world.live()[0].name)
    world.apply(replicas=4)
    assert (gangs(world), groups(world)) == ([""] * 3, [name])


@pytest.mark.parametrize("has_lost", [False, True])
def test_resumed_job_starts_together_with_its_new_minimum(has_lost: bool) -> None:
    world = made(runPolicy={"drainSeconds": 60})
    world.run()
    if has_lost:
        world.then.lose(world.head.name)  # and stays listed for ever
        world.wait(20)
    world.apply(suspend=True, workerGroups=[{"name": "cpu", "minReplicas": 1}])
    for _ in range(3):
        world.wait(61)
    assert (len(world.pods), counts(world)) == (has_lost, [3, 1])
    gangs(world)
    world.apply(suspend=False)
    assert (counts(world), gangs(world)) == ([2], groups(world) * 3)


def test_pod_that_ends_before_it_has_a_node_is_replaced_in_the_gang() -> None:
    world = made()
    gangs(world)
    world.vanish(world.live()[0].name)
    world.then.vanish(world.head.name)
    assert (gangs(world), counts(world)) == (groups(world) * 2, [])


def failed_twice() -> World:
    """A job that runs; the next failure of its first worker is followed by a backoff."""
    world = made()
    world.run()
    for _ in range(2):
        world.then.finish(world.live()[0].name)
        world.start_all()
    return world


def test_nothing_waits_for_a_slot_in_its_backoff() -> None:
    world = failed_twice()
    world.vanish(world.head.name)
    world.vanish(world.live()[0].name)
    gangs(world)
    world.settle()
    assert (gangs(world), counts(world)) == (["", ""], [])


def test_a_changed_template_ends_the_wait_for_a_backoff() -> None:
    world = failed_twice()
    for pod in [*world.live(), world.head]:
        world.vanish(pod.name)
    gangs(world)
    world.apply(workerGroups=[{**OF_TWO[0], "resources": {"requests": {"cpu": "2"}}}])
    assert gangs(world) == groups(world) * 3


def test_job_that_lost_all_its_pods_starts_together() -> None:
    world = made()
    world.run()
    for name in list(world.pods):
        world.finish(name)
    gangs(world)
    world.settle()
    assert (gangs(world), groups(world)) == (groups(world) * 3, groups(world))


def test_pod_that_terminates_still_holds_its_node() -> None:
    world = made()
    world.run()
    gangs(world)
    for name in list(world.pods):
        world.delete(name)
    world.settle()
    assert gangs(world) == ["", ""], "workers start while the head drains"


@pytest.mark.parametrize(
    "template",
    [{"schedulingGroup": {"podGroupName": "theirs"}}, {"priorityClassName": "high"}, {"schedulerName": "another"}],
)
def test_templates_that_exclude_a_gang_have_none(template: dict[str, Any]) -> None:
    world = made(head={"template": {"spec": template}})
    assert (groups(world), counts(world)) == ([], [])
    assert gangs(world) == [template.get("schedulingGroup", {}).get("podGroupName", ""), "", ""]


def test_priority_class_of_all_pods_is_the_group_s() -> None:
    def spec(name: str) -> dict[str, Any]:
        template = {"template": {"spec": {"priorityClassName": name}}}
        return {"head": template, "workerGroups": [template | OF_TWO[0]]}

    world = made(**spec("high"))
    (before,) = groups(world)
    assert [group["spec"]["priorityClassName"] for group in applied(world)] == ["high"]
    world.apply(**spec("low"))
    (after,) = groups(world)
    assert after != before


def test_queue_replaces_the_gang() -> None:
    world = made()
    world.run()
    world.then.enqueue("team")
    assert groups(world) == []


def test_without_the_api_or_its_permission_pods_name_no_group() -> None:
    world = World(workerGroups=OF_TWO)
    world.settle()
    assert (groups(world), gangs(world)) == ([], [""] * 3)
    world = World(defaults=SERVED, workerGroups=OF_TWO)
    for _ in range(5):
        plan = world.plan()
        for action in plan.actions:
            if not (isinstance(action, ApplyChild) and action.manifest["kind"] == "PodGroup"):
                world.do(action)
        world.write(plan)
    assert gangs(world) == [""] * 3
