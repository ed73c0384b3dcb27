"""What the executor does when names are taken, labels are lost, or the API server refuses a change."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from cormorant_contract.job import KIND
from cormorant_contract.status import CollectorJobStatus
from cormorant_operator.decide import plan as orders
from cormorant_operator.decide.queueing import _write
from cormorant_operator.errors import KubeConflict
from cormorant_operator.job import Identity
from cormorant_operator.job_state import RefusalKind
from cormorant_operator.render.children import config_map
from cormorant_operator.workload import Workload, read_workload
from cormorant_testing.operator_world import World, changes, make_job, of_kind, running

EARLIER = {"kind": KIND, "name": "pong", "uid": "of-the-earlier-job", "controller": True}
CLAIM = config_map(make_job())


def reclaim(workload: Workload) -> orders.Patch:
    return _write(workload, {"reclaimablePods": []})


def refusal(world: World, owner: str) -> tuple[str, str]:
    found = world.known.refusals[owner]
    return found.kind.value, found.message


def test_unreadable_node_is_not_lost() -> None:
    world = World()
    healthy = {"spec": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    world.api.keep({"kind": "Node", "metadata": {"name": "healthy"}, **healthy})
    world.api.put("Node", "silent")
    world.api.put("Node", "secret")
    world.api.refused["GET secret"] = 403
    for name, is_lost in {"healthy": False, "silent": True, "gone": True, "secret": False}.items():
        world.do(orders.CheckNode(name=name))
        assert world.known.nodes[name].is_lost == is_lost
    assert world.known.refusals == {}


def test_verdicts_on_earlier_templates_are_forgotten() -> None:
    world = World()
    check = of_kind(world.plan().actions, orders.CheckTemplate)[0]
    world.do(replace(check, template="earlier"))
    world.do(check)
    assert world.known.verdicts.keys() == {world.job.templates.head}


# -- the token Secret: it may be created, and neither read nor deleted -------------------------------------------


def test_pods_wait_for_the_secrets_name_and_a_stranger_is_a_conflict() -> None:
    world = World()
    world.api.put("Secret", "pong-tokens")
    for _ in range(10):
        world.settle()
        assert world.condition("Scheduled") == "False/NameNotFreeYet"
        world.tick(1)
    world.settle()
    assert world.condition("Accepted") == "False/NameConflict"
    words = "Secret pong-tokens exists and belongs to another owner; delete it, or rename the job"
    assert world.message("Accepted") == words
    assert (world.pods, world.job.status.epoch, world.known.has_tokens) == ({}, 0, False)
    assert world.api.requests.count("TRY pong-tokens") == 11
    assert "POST pong-tokens" not in world.api.requests


def test_secret_is_made_after_its_claim_and_goes_with_its_owner_if_changed() -> None:
    world = World()
    world.do(orders.CreateTokens(claim=CLAIM))
    name = CLAIM["metadata"]["name"]
    claimed = ["TRY pong-tokens", f"GET {name}", f"APPLY {name}"]
    assert world.api.requests == [*claimed, "POST pong-tokens", "POST pong-tokens"]
    (owner,) = world.api.stored["Secret", "pong-tokens"]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("ConfigMap", "uid-of-ConfigMap-pong-tokens")
    # As by an operator that knows nothing of it, because the last one was killed right after the creation.
    world.do(orders.CreateTokens())
    assert (world.known.has_tokens, world.known.refusals, world.known.refused_since) == (True, {}, None)
    del world.api.requests[:]
    world.do(orders.CreateTokens(is_wrong=True))
    assert world.api.requests == ["TRY pong-tokens", "GET pong-tokens", "DELETE pong-tokens"]
    assert world.known.refused_since is not None, "the new one has its time"
    world.api.remove("Secret", "pong-tokens")  # the garbage collector's work
    world.do(orders.CreateTokens())
    assert {kind for kind, name in world.api.stored if name == "pong-tokens"} == {"ConfigMap", "Secret"}


def test_secret_of_a_strangers_owner_is_left_alone() -> None:
    world = World()
    world.api.put("Secret", "pong-tokens")
    world.do(orders.CreateTokens(is_wrong=True))
    world.api.put("ConfigMap", "pong-tokens", ownerReferences=[{**EARLIER, "name": "other"}])
    world.do(orders.CreateTokens(is_wrong=True))
    assert "DELETE pong-tokens" not in world.api.requests
    world.api.remove("Secret", "pong-tokens")
    world.do(orders.CreateTokens())
    assert refusal(world, "Secret")[0] == "NameConflict"


# -- one name twice in a row -----------------------------------------------------------------------------------------


def test_service_of_an_earlier_job_is_looked_at_every_second() -> None:
    world = World()
    world.api.put("Service", "pong-api", ownerReferences=[EARLIER])
    words = "Service pong-api is left over from an earlier job of this name; waiting for Kubernetes to delete it"
    for count in range(1, 4):
        world.settle()
        assert (world.condition("Scheduled"), world.message("Scheduled")) == ("False/NameNotFreeYet", words)
        assert world.plan().due == world.now + timedelta(seconds=1)
        assert world.api.requests.count("GET pong-api") == count
        world.tick(1)
    world.api.remove("Service", "pong-api")
    world.run()
    assert ("Service", "pong-api") in world.children
    assert world.condition("Scheduled") == "True/AllPodsScheduled"


def test_head_of_an_earlier_job_that_drains_is_passed_over() -> None:
    world = World()
    since = "2026-01-01T00:00:00Z"
    world.api.put("Pod", "pong-head-1", ownerReferences=[EARLIER], deletionTimestamp=since)
    world.run()
    assert (world.head.name, world.known.refusals) == ("pong-head-2", {})


def test_pod_of_another_owner_is_never_adopted() -> None:
    world = World()
    world.api.put("Pod", "pong-head-1")
    world.settle()
    words = "Pod pong-head-1 exists and belongs to another owner; delete it, or rename the job"
    assert (world.condition("Accepted"), world.message("Accepted")) == ("False/NameConflict", words)
    assert ("pong-head-1" in world.pods, world.plan().due) == (False, world.now + timedelta(seconds=5))


# -- labels that others take away ------------------------------------------------------------------------------------


def test_child_that_lost_its_labels_is_applied_once() -> None:
    world = running()
    service = world.api.stored["Service", "pong-api"]
    # A watch that selects by label tells of a deletion, with the labels as they were.
    world.api.keep({**service, "metadata": {**service["metadata"], "labels": {}}})
    version = world.api.stored["Service", "pong-api"]["metadata"]["resourceVersion"]
    world.cache.see({**service, "metadata": {**service["metadata"], "resourceVersion": version}}, is_deleted=True)
    assert ("Service", "pong-api") not in world.children
    del world.api.requests[:]
    world.settle()
    assert world.api.requests == ["GET pong-api", "APPLY pong-api"]
    assert ("Service", "pong-api") in world.children


@pytest.mark.parametrize(("label", "is_put_right"), [("app.kubernetes.io/instance", True), ("team", False)])
def test_label_that_others_changed_is_put_right(label: str, *, is_put_right: bool) -> None:
    world = running()
    service = world.api.stored["Service", "pong-api"]
    labels = {**service["metadata"]["labels"], label: "else"}
    world.keep({**service, "metadata": {**service["metadata"], "labels": labels}})
    applied = [order.manifest["metadata"]["name"] for order in of_kind(world.plan().actions, orders.ApplyChild)]
    assert applied == ["pong-api"] * is_put_right
    world.settle()
    assert not changes(world.plan())


# -- refused changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "condition", "reason"),
    [(403, "Accepted", "Forbidden"), (400, "Accepted", "Forbidden"), (500, "Scheduled", "ApiServerError")],
)
def test_pod_that_may_not_be_deleted_waits_and_others_do_not(code: int, condition: str, reason: str) -> None:
    world = running(runPolicy={"maxUnavailable": 2})
    first, second = world.live()
    world.api.refused[f"DELETE {first.name}"] = code
    world.edit(workerGroups=[{"name": "cpu", "template": {"metadata": {"labels": {"a": "b"}}}}])
    world.tick(0.4)
    refused_at = world.now
    world.step()
    world.step()
    assert [world.pods[pod.name].is_terminating for pod in (first, second)] == [False, True]
    assert of_kind(world.step().actions, orders.Delete) == []
    assert world.condition(condition) == f"False/{reason}"
    assert world.message(condition) == f"cannot delete Pod {first.name}: {first.name} is not to be touched"
    over = refused_at + timedelta(seconds=5)
    later = world.plan(now=over)
    assert later.due is None or later.due > over, "no hot loop until the next whole second"


def test_missing_cert_manager_is_named_while_it_is_asked_for() -> None:
    issued, given = ({"tls": tls} for tls in ({"certManager": {"issuerRef": {"name": "ca"}}}, {"secretName": "mine"}))
    world = World(head=issued)
    # Of a kind that is not installed, every path is unknown.
    world.api.refused["APPLY pong-tls"] = 404
    world.settle()
    words = "this cluster has no kind Certificate; install cert-manager, or give head.tls.secretName"
    assert world.condition("Accepted") == "False/Forbidden"
    assert world.message("Accepted") == f"Certificate pong-tls: {words}"
    world.apply(head=given)
    assert world.condition("Accepted") == "True/Accepted"
    world.apply(head=issued)
    assert world.condition("Accepted") == "False/Forbidden"
    world.api.refused.clear()
    world.wait(600)
    assert ("Certificate", "pong-tls") in world.children
    assert world.condition("Accepted") == "True/Accepted"


# -- Kueue ------------------------------------------------------------------------------------------------------


def test_workload_that_kueue_wrote_meanwhile_is_left_alone() -> None:
    world = World(queue="team")
    world.settle()
    found = world.kueue.workload
    raw = world.api.stored["Workload", found.name]
    world.api.keep({**raw, "status": {"conditions": []}})  # Kueue's, unseen
    world.do(reclaim(found))
    assert (world.kueue.status, world.known.refusals) == ({"conditions": []}, {})
    newer = read_workload(world.api.stored["Workload", found.name])
    world.do(reclaim(newer))
    assert world.kueue.status == {"conditions": [], "reclaimablePods": []}
    assert world.api.requests[-1] == f"PATCH {found.name}/status"


def test_missing_flavor_is_explained_and_an_old_one_forgotten() -> None:
    world = World()
    world.do(orders.ReadQueueObject(kind="ResourceFlavor", name="on-demand", admission="a"))
    words = "cannot read ResourceFlavor on-demand: there is no ResourceFlavor on-demand; create it"
    assert refusal(world, "ResourceFlavor") == ("Forbidden", words)
    world.tick(600)  # it is due again
    world.kueue.label_nodes(pool="a")
    for admission in ("b", "c"):
        world.do(orders.ReadQueueObject(kind="ResourceFlavor", name="spot", admission=admission))
    found = {key: placement.node_selector for key, placement in world.known.flavors.items()}
    assert (found, world.known.refusals) == ({("spot", "c"): {"pool": "a"}}, {})


# -- the status ------------------------------------------------------------------------------------------------------


def test_late_status_never_overwrites_a_newer_one() -> None:
    world = World()
    version = world.api.stored[KIND, "pong"]["metadata"]["resourceVersion"]
    seen = Identity(name="pong", namespace="team-a", uid=world.job.uid, resource_version=version)
    asyncio.run(world.executor.write_status(seen, CollectorJobStatus(phase="Completed")))
    with pytest.raises(KubeConflict):
        asyncio.run(world.executor.write_status(seen, CollectorJobStatus(phase="Running")))
    assert world.api.stored[KIND, "pong"]["status"]["phase"] == "Completed"


# -- what is said when a pod is not created ----------------------------------------------------------------------------
# The bodies are those of Kubernetes 1.34, shortened; a busy one answers 429 in plain text, which counts as the message.

FORBIDDEN = 'pods "p" is forbidden: '
WEBHOOK = 'failed calling webhook "away.example.com": failed to call webhook: Post "https://127.0.0.1:1/": refused'
QUOTA, INVALID, SERVER = RefusalKind.QUOTA, RefusalKind.INVALID, RefusalKind.SERVER
NAMESPACE, NO_RIGHT = RefusalKind.NAMESPACE, RefusalKind.FORBIDDEN
ANSWERS = {
    "quota": (403, FORBIDDEN + "exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0", QUOTA),
    "quota-of-requests": (403, FORBIDDEN + "failed quota: q: must specify requests.cpu for: c", QUOTA),
    "quota-of-limits": (403, FORBIDDEN + "failed quota: q: must specify limits.memory for: c", QUOTA),
    "pod-security": (403, FORBIDDEN + 'violates PodSecurity "restricted:latest": runAsNonRoot != true', INVALID),
    "limit-range": (403, FORBIDDEN + "maximum cpu usage per Container is 1, but limit is 2", NO_RIGHT),
    "rights": (403, 'pods is forbidden: User "nobody" cannot create resource "pods" in API group ""', NO_RIGHT),
    "namespace-terminating": (403, FORBIDDEN + "unable to create new content in namespace t", NAMESPACE),
    "namespace-gone": (404, 'namespaces "nowhere" not found', NAMESPACE),
    "invalid": (422, 'Pod "p" is invalid: spec.containers[0].imagePullPolicy: Unsupported', INVALID),
    "expired-login": (401, "Unauthorized", SERVER),
    "webhook-away": (500, f"Internal error occurred: {WEBHOOK}", SERVER),
    "busy": (429, "Too many requests, please try again later.", SERVER),
}
CAUSES = {
    "namespace-terminating": {"reason": "NamespaceTerminating", "message": "namespace t is being terminated"},
    "invalid": {"reason": "FieldValueNotSupported", "field": "spec.containers[0].imagePullPolicy"},
    "webhook-away": {"message": WEBHOOK},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_refused_pod_is_understood_and_told_in_the_servers_words(name: str) -> None:
    world, (code, message, kind) = World(), ANSWERS[name]
    world.api.refused = {"POST": code, "TRY": code}
    world.api.refusal = {"message": message, "details": {"causes": [CAUSES[name]] if name in CAUSES else []}}
    check = of_kind(world.plan().actions, orders.CheckTemplate)[0]
    world.do(orders.CreatePod(owner="cpu", manifest=check.manifest))
    world.do(check)
    assert refusal(world, "cpu") == (kind.value, message)
    # A template is blamed for what is its own fault alone.
    verdict = world.known.verdicts.get(check.template)
    error = message if kind in (INVALID, NO_RIGHT) else ""
    is_judged = kind is not SERVER and name != "rights"
    assert (verdict.error if verdict is not None else None) == (error if is_judged else None)


# -- what is not wanted any more ---------------------------------------------------------------------------------------


def test_unwatched_child_that_others_deleted_is_deleted_once() -> None:
    world = running()
    world.api.remove("PodDisruptionBudget", "pong-head")  # no watch tells of it
    world.apply(runPolicy={"disruptionBudget": "None"})
    assert world.api.requests.count("DELETE pong-head") == 1
    assert not [kind for kind, _ in world.children if kind == "PodDisruptionBudget"]


def test_group_that_was_removed_leaves_no_pod_and_no_trouble() -> None:
    groups = [{"name": "cpu"}, {"name": "gpu", "replicas": 1}]
    world = running(workerGroups=groups)
    world.apply(workerGroups=groups[:1])
    world.tick(60)
    world.run()
    assert (world.slots(), world.head.name) == (["cpu-0", "cpu-1"], "pong-head-2"), "a head reads the groups once"
    world.quota = len(world.pods)
    world.apply(workerGroups=groups)
    world.wait(61)
    world.then.start_all()
    assert world.condition("Scheduled") == "False/QuotaExceeded"
    world.apply(workerGroups=groups[:1])
    world.quota = None
    world.wait(61)
    world.run()
    assert world.condition("Scheduled") == "True/AllPodsScheduled"
