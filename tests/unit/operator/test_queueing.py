"""Jobs with a queue: no pod before Kueue admits them, none kept after it evicts them, and nothing done on silence.
PodGroups: no later pod waits for another.
"""

from collections.abc import Callable
from typing import Any

import pytest

from cormorant_operator import names
from cormorant_operator.decide.plan import ApplyChild, CreatePod, Delete
from cormorant_operator.job import read_job
from cormorant_operator.job_state import Refusal, RefusalKind
from cormorant_operator.settings import OperatorDefaults
from cormorant_testing.operator_world import UID, World, changes, make_document, of_kind, running

QUEUE = "team-queue"
WORKLOAD = names.workload("pong", UID)


def waiting(**spec: Any) -> World:
    """A job whose Workload is in the queue."""
    world = World(queue=QUEUE, **spec)
    world.settle()
    return world


def admitted(counts: dict[str, int] | None = None, **spec: Any) -> World:
    """A job with a queue that collects."""
    world = waiting(**spec)
    world.kueue.admit(world.now, counts)
    world.run()
    world.tick(20)
    world.then.collect(1000)
    return world


def pod_sets(world: World) -> dict[str, tuple[int, int | None]]:
    return {item["name"]: (item["count"], item.get("minCount")) for item in world.kueue.raw["spec"]["podSets"]}


def gone(world: World) -> None:
    """What is told to end has ended."""
    world.settle()
    world.wait(61)


def test_no_pod_before_kueue_admits() -> None:
    world = waiting()
    world.kueue.hold("insufficient unused quota for cpu", world.now)
    world.settle()
    assert (world.pods, pod_sets(world)) == ({}, {"head": (1, None), "cpu": (2, None)})
    assert (world.job.status.phase, world.job.status.reason) == ("Pending", "WaitingForQuota")
    assert world.message("Scheduled") == "queue team-queue: Pending: insufficient unused quota for cpu"
    metadata = world.kueue.raw["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/job-uid"] == world.job.uid
    assert [owner["kind"] for owner in metadata["ownerReferences"]] == ["CollectorJob"]
    # It may wait for days, and follows the manifest.
    world.wait(10 * 86_400)
    world.apply(replicas=5)
    assert pod_sets(world)["cpu"] == (5, None)
    world.then.enqueue("other")
    assert world.kueue.raw["spec"]["queueName"] == "other"
    assert world.condition("Failed") == ""


def test_admitted_job_runs_where_kueue_says() -> None:
    world = waiting()
    world.kueue.label_nodes(pool="spot")
    update = {"name": "cpu", "tolerations": [{"key": "spot", "operator": "Exists"}], "annotations": {"zone": "a"}}
    world.kueue.admit(world.now, admissionChecks=[{"name": "zone", "podSetUpdates": [update]}])
    world.run()
    assert world.job.status.workers == "2/2"
    head, *workers = [action.manifest for action in of_kind(world.done, CreatePod)]
    assert head["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "spot"}
    assert {"key": "spot", "operator": "Exists"} not in head["spec"]["tolerations"]
    for worker in workers:
        assert worker["spec"]["nodeSelector"]["pool"] == "spot"
        assert worker["spec"]["tolerations"][-1] == {"key": "spot", "operator": "Exists"}
        assert worker["metadata"]["annotations"]["zone"] == "a"
    assert world.kueue.condition("PodsReady") == "True/Started"
    world.restart_operator()  # the next one reads the flavor again
    world.evict(world.live()[0].name)
    world.run()
    assert of_kind(world.done, CreatePod)[-1].manifest["spec"]["nodeSelector"]["pool"] == "spot"


@pytest.mark.parametrize(("reason", "requeued"), [("Preempted", "True"), ("Deactivated", "False")])
def test_eviction_drains_and_gives_the_quota_back(reason: str, requeued: str) -> None:
    world = admitted()
    world.kueue.evict(world.now, reason)
    world.settle()
    assert (world.known.answer.phase, world.job.status.phase) == ("Draining", "Suspending")
    assert world.condition("Suspended") == "False/Evicted"
    assert (world.kueue.condition("QuotaReserved"), len(world.live())) == ("True/QuotaReserved", 2)
    # Learners take the last batches; then the head ends by itself.
    world.collect(1500)
    world.then.finish(world.head.name, exit_code=143)
    assert world.kueue.condition("QuotaReserved") == "True/QuotaReserved", "workers still use it"
    gone(world)
    assert (world.pods, "admission" in world.kueue.status) == ({}, False)
    assert world.kueue.condition("QuotaReserved") == "False/Pending"
    assert world.kueue.condition("Admitted") == "False/NoReservation"
    assert world.kueue.condition("Requeued") == f"{requeued}/{reason}", "Kueue itself queues a deactivated one again"
    assert world.kueue.condition("PodsReady") == "False/WaitForStart"
    assert (world.job.status.phase, world.job.status.reason) == ("Pending", "WaitingForQuota")
    # Admitted again, it goes on where it was.
    world.kueue.admit(world.now)
    world.run()
    assert (world.head.name, world.job.status.frames.collected) == ("pong-head-2", 1500)
    assert (world.job.status.head_restarts, world.kueue.condition("PodsReady")) == (0, "True/Started")
    assert "Evicted" in world.told


def test_deleted_workload_destroys_nothing() -> None:
    world = admitted()
    pods = set(world.pods)
    world.tick(5)
    world.vanish(WORKLOAD, "Workload")
    world.settle()
    assert world.kueue.raw is not None, "a new one takes its place"
    # Also where Kueue writes Admitted=False into every new Workload.
    world.kueue.hold("insufficient unused quota", world.now)
    world.kueue._say({"Admitted": ("False", "NoReservation")}, world.now)
    world.settle()
    assert set(world.pods) == pods
    # What dies meanwhile waits for Kueue.
    world.then.evict(world.live()[0].name)
    assert (world.slots(), world.job.status.phase) == (["cpu-1"], "Degraded")
    assert world.job.status.reason == "WaitingForQuota"
    world.kueue.admit(world.now)
    world.run()
    assert world.slots() == ["cpu-0", "cpu-1"]


def test_withdrawn_admission_drains() -> None:
    world = admitted()
    world.tick(5)
    world.kueue._say({"Admitted": ("False", "NoReservation"), "QuotaReserved": ("False", "Pending")}, world.now)
    world.settle()
    assert world.condition("Suspended") == "False/Evicted"


def test_cluster_without_kueue_runs_jobs_without_a_queue() -> None:
    world = running()
    assert not any(WORKLOAD in request for request in world.api.requests)
    queued = World(queue=QUEUE)
    queued.api.refused[f"APPLY {WORKLOAD}"] = 404
    queued.settle()
    words = "this cluster has no kind Workload; install Kueue 0.15 or newer, or remove the label "
    assert queued.message("Accepted") == f"Workload {WORKLOAD}: {words}kueue.x-k8s.io/queue-name from the job"
    assert queued.condition("Accepted") == "False/Forbidden"
    assert queued.pods == {}
    # Without the label it runs.
    queued.enqueue("")
    queued.run()
    assert (queued.job.status.phase, queued.condition("Accepted")) == ("Running", "True/Accepted")


def test_workload_that_cannot_be_read_destroys_nothing() -> None:
    world = admitted()
    pods = set(world.pods)
    raw = world.api.remove("Workload", WORKLOAD)
    world.restart_operator()
    world.known.refusals["Workload"] = Refusal(kind=RefusalKind.FORBIDDEN, message="no right to list", at=world.now)
    world.settle()
    assert set(world.pods) == pods
    assert of_kind(world.done[-10:], Delete) == []
    world.keep(raw)
    del world.known.refusals["Workload"]
    world.run()
    assert set(world.pods) == pods


@pytest.mark.parametrize("kind", ["Completed", "Failed"])
def test_finished_when_the_pods_are_gone(kind: str) -> None:
    world = admitted(runPolicy={"maxHeadRestarts": 0})
    world.then.finish(world.head.name, exit_code=0 if kind == "Completed" else 2)
    assert world.condition(kind).startswith("True")
    assert world.kueue.condition("Finished") == "", "workers are still ending"
    gone(world)
    assert world.kueue.condition("Finished") == f"True/{'Succeeded' if kind == 'Completed' else 'Failed'}"


def test_suspend_and_a_removed_label_leave_the_queue() -> None:
    world = admitted()
    world.apply(suspend=True)
    world.finish(world.head.name, exit_code=143)
    gone(world)
    assert (world.kueue.raw, world.condition("Suspended")) == (None, "True/Suspended")
    world.apply(suspend=False, replicas=3)
    assert pod_sets(world) == {"head": (1, None), "cpu": (3, None)}
    world.kueue.admit(world.now)
    world.run()
    # The next operator finds its Workload still there, and does not know the flavors in it.
    world.enqueue("")
    world.restart_operator()
    world.evict(world.live()[0].name)
    world.run()
    assert (world.kueue.raw, world.slots()) == (None, ["cpu-0", "cpu-1", "cpu-2"])


def test_elastic_group_starts_with_fewer_and_never_exceeds_what_is_admitted() -> None:
    group = {"name": "cpu", "minReplicas": 1, "maxReplicas": 8}
    world = admitted({"cpu": 2}, replicas=4, workerGroups=[group])
    assert (pod_sets(world)["cpu"], len(world.live())) == ((4, 1), 2)
    assert world.message("Scheduled").startswith("Kueue admitted 2 of 4 workers of group cpu; ")
    world.edit(replicas=6)
    world.run()
    assert (len(world.live()), world.job.status.workers) == (2, "2/2")
    # An autoscaled one asks for its maximum, and keeps it.
    group = {"name": "cpu", "autoscale": {"minReplicas": 1, "maxReplicas": 5}}
    world = admitted(replicas=2, workerGroups=[group])
    assert (pod_sets(world)["cpu"], len(world.live())) == ((5, 1), 2)
    assert world.kueue.status.get("reclaimablePods") is None


def test_workers_that_the_user_takes_away_are_reclaimed() -> None:
    world = admitted(replicas=4)
    world.apply(replicas=1)
    assert world.kueue.status.get("reclaimablePods") is None, "they are still ending"
    world.then.say(world.head, sizes={"cpu": 1})
    gone(world)
    assert world.kueue.status["reclaimablePods"] == [{"name": "cpu", "count": 3}]
    # Kueue gave their quota to others.
    world.edit(replicas=3)
    world.run()
    assert len(world.live()) == 1
    assert world.message("Scheduled").startswith("Kueue admitted 1 of 3 workers of group cpu; ")


def test_other_resources_wait_for_another_admission() -> None:
    world = admitted()
    pods = set(world.pods)
    world.apply(workerGroups=[{"name": "cpu", "resources": {"requests": {"cpu": "4"}}}])
    assert set(world.pods) == pods
    world.then.evict(world.live()[0].name)
    assert (len(world.live()), world.job.status.reason) == (1, "WaitingForQuota")
    assert world.message("Scheduled").endswith("suspend and resume the job for new quota")
    # Another image is no other resource.
    world.apply(workerGroups=[{"name": "cpu"}], image="example/cormorant:2")
    assert len(world.live()) == 2


def test_priority_class_becomes_a_priority() -> None:
    world, document = World(queue=QUEUE), make_document(queue=QUEUE)
    document["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "high"
    world.job = read_job(document)
    world.settle()
    assert (world.kueue.raw, world.condition("Accepted")) == (None, "False/Forbidden")
    world.api.keep({"kind": "WorkloadPriorityClass", "metadata": {"name": "high"}, "value": 1000})
    world.tick(600)
    world.known.refusals.clear()
    world.settle()
    spec = world.kueue.raw["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["name"]) == (1000, "high")


def test_job_of_another_controller_is_left_alone() -> None:
    world = World(managedBy="example.com/manager")
    assert not changes(world.plan())
    assert world.plan().poll_s is None
    ours = World(managedBy="cormorant.dev/operator")
    ours.run()
    assert ours.job.status.phase == "Running"


# -- PodGroups: the head and the fewest workers get nodes together -----------------------------------------------


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


def pod_groups(world: World) -> list[str]:
    """Those that exist."""
    return sorted(name for kind, name in world.children if kind == "PodGroup")


def gangs(world: World) -> list[str]:
    """The group of every pod that was created since the last call; empty where it names none."""
    pods = [order.manifest["spec"] for order in of_kind(world.done, CreatePod)]
    world.done.clear()
    return [pod.get("schedulingGroup", {}).get("podGroupName", "") for pod in pods]


def test_head_and_fewest_workers_start_together_and_later_pods_alone() -> None:
    world = made(replicas=3)
    (name,) = pod_groups(world)
    assert applied(world)[0]["metadata"]["ownerReferences"][0]["uid"] == world.job.uid
    assert counts(world) == [3]
    assert gangs(world) == [name] * 4
    world.run()
    assert counts(world) == [1], "a fourth pod that is still in the group waits for none"
    world.finish(world.head.name)
    world.vanish(world.live()[0].name)
    world.apply(replicas=4)
    assert (gangs(world), pod_groups(world)) == ([""] * 3, [name])
    world.then.enqueue("team")
    assert pod_groups(world) == [], "the queue replaces it"


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
    assert (counts(world), gangs(world)) == ([2], pod_groups(world) * 3)


def ran() -> World:
    world = made()
    world.run()
    return world


def failed_twice() -> World:
    """A job that runs; the next failure of its first worker is followed by a backoff."""
    world = ran()
    for _ in range(2):
        world.then.finish(world.live()[0].name)
        world.start_all()
    return world


@pytest.mark.parametrize(
    ("begin", "happens", "workers", "together", "alone"),
    [
        pytest.param(made, World.vanish, 1, 2, 0, id="no pod had a node"),
        pytest.param(failed_twice, World.vanish, 1, 0, 2, id="a slot is in its backoff"),
        pytest.param(ran, World.finish, 2, 3, 0, id="all pods ended"),
        pytest.param(ran, World.delete, 2, 0, 2, id="workers start while the head drains on its node"),
    ],
)
def test_head_and_workers_are_replaced_together_where_none_has_a_node(
    begin: Callable[[], World], happens: Callable[..., None], workers: int, together: int, alone: int
) -> None:
    world = begin()
    names = pod_groups(world)
    gangs(world)
    for pod in (world.head, *world.live()[:workers]):
        happens(world, pod.name)
    world.settle()
    assert (gangs(world), pod_groups(world)) == (names * together + [""] * alone, names)


def test_a_changed_template_ends_the_wait_for_a_backoff() -> None:
    world = failed_twice()
    for pod in [*world.live(), world.head]:
        world.vanish(pod.name)
    gangs(world)
    world.apply(workerGroups=[{**OF_TWO[0], "resources": {"requests": {"cpu": "2"}}}])
    assert gangs(world) == pod_groups(world) * 3


@pytest.mark.parametrize(
    "template",
    [{"schedulingGroup": {"podGroupName": "theirs"}}, {"priorityClassName": "high"}, {"schedulerName": "another"}],
)
def test_templates_exclude_a_gang_or_give_it_their_class(template: dict[str, Any]) -> None:
    head = {"template": {"spec": template}}
    world = made(head=head)
    assert (pod_groups(world), counts(world)) == ([], [])
    assert gangs(world) == [template.get("schedulingGroup", {}).get("podGroupName", ""), "", ""]
    if "priorityClassName" in template:
        # A class that all pods have is the group's, which is another one for another class.
        world = made(head=head, workerGroups=[head | OF_TWO[0]])
        assert [group["spec"]["priorityClassName"] for group in applied(world)] == ["high"]
        assert pod_groups(world) != pod_groups(made())


def test_without_the_permission_for_pod_groups_pods_name_none() -> None:
    (name,) = pod_groups(made())
    world = World(defaults=SERVED, workerGroups=OF_TWO)
    world.api.refused[f"APPLY {name}"] = 403
    world.settle()
    assert (gangs(world), pod_groups(world)) == ([""] * 3, [])
