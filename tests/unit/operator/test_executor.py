"""What the executor does when names are taken, labels are lost, or the API server refuses a change."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cormorant_contract.job import API_VERSION, KIND
from cormorant_contract.status import CollectorJobStatus, Condition
from cormorant_operator.cache import Cache
from cormorant_operator.decide import plan as orders
from cormorant_operator.decide.status import merge
from cormorant_operator.errors import KubeConflict
from cormorant_operator.executor import Executor
from cormorant_operator.job import Fact, Identity
from cormorant_operator.job_state import JobState, Refusal, RefusalKind
from cormorant_operator.render.children import certificates, config_map, digest_of, services
from cormorant_operator.workload import read_workload
from cormorant_testing.api_server import ApiServer
from cormorant_testing.operator_world import BEGIN, World, changes, make_job, of_kind, running

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = make_job()
EARLIER = {"kind": KIND, "name": "pong", "uid": "of-the-earlier-job", "controller": True}
CLAIM = config_map(JOB, digest="d")


def test_unreadable_node_is_not_lost() -> None:
    scene = Scene()
    healthy = {"spec": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    scene.api.keep({"kind": "Node", "metadata": {"name": "healthy"}, **healthy})
    scene.api.put("Node", "silent")
    scene.api.put("Node", "secret")
    scene.api.refused["GET secret"] = 403
    for name, is_lost in {"healthy": False, "silent": True, "gone": True, "secret": False}.items():
        scene.do(orders.CheckNode(name=name))
        # Those that no pod of the job has are forgotten.
        assert {other: fact.is_lost for other, fact in scene.state.nodes.items()} == {name: is_lost}
    assert scene.state.refusals == {}


def test_verdicts_on_earlier_templates_are_forgotten() -> None:
    scene = Scene()
    pod = {"kind": "Pod", "metadata": {"name": "pong-head-1"}}
    scene.do(*(orders.CheckTemplate(template=template, manifest=pod) for template in ("earlier", JOB.templates.head)))
    assert scene.state.verdicts.keys() == {JOB.templates.head}


class Scene:
    """An executor at an API server."""

    def __init__(self) -> None:
        self.api, self.cache, self.state = ApiServer(), Cache(), JobState()
        given: Any = (self.api, object())
        self.executor = Executor(*given, self.cache, key=b"k" * 32, clock=lambda: NOW)

    def do(self, *actions: orders.Action) -> None:
        async def all_of_them() -> None:
            for action in actions:
                await self.executor.do(JOB, action, self.state, decided_at=NOW)

        asyncio.run(all_of_them())

    def age(self) -> None:
        """What was refused was refused to an earlier plan."""
        earlier = NOW - timedelta(days=1)
        self.state.refusals = {owner: replace(found, at=earlier) for owner, found in self.state.refusals.items()}

    def refusal(self, owner: str) -> tuple[str, str]:
        found = self.state.refusals[owner]
        return found.kind.value, found.message


def new_head(world: World) -> orders.CreatePod:
    world.step()
    (order,) = (order for order in of_kind(world.plan().actions, orders.CreatePod) if order.owner == "head")
    assert isinstance(order, orders.CreatePod)
    return order


# -- the token Secret: it may be created, and neither read nor deleted -------------------------------------------


def test_new_jobs_secret_is_made_after_its_claim() -> None:
    scene = Scene()
    scene.do(orders.CreateTokens(claim=CLAIM))
    claimed = ["TRY pong-tokens", "GET pong-config-d", "APPLY pong-config-d"]
    assert scene.api.requests == [*claimed, "POST pong-tokens", "POST pong-tokens"]
    (owner,) = scene.api.stored["Secret", "pong-tokens"]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("ConfigMap", "uid-of-ConfigMap-pong-tokens")
    assert (scene.state.has_tokens, scene.state.refusals) == (True, {})


def test_strangers_secret_is_a_name_conflict() -> None:
    scene = Scene()
    scene.api.put("Secret", "pong-tokens")
    for _ in range(10):
        scene.age()
        scene.do(orders.CreateTokens(claim=CLAIM))
        assert scene.refusal("Secret")[0] == "NameNotFreeYet"
    scene.age()
    scene.do(orders.CreateTokens(claim=CLAIM))
    words = "Secret pong-tokens exists and belongs to another owner; delete it, or rename the job"
    assert scene.refusal("Secret") == ("NameConflict", words)
    assert (scene.state.has_tokens, set(scene.api.requests)) == (False, {"TRY pong-tokens"})


def test_pods_wait_until_the_secrets_name_is_free() -> None:
    world = World()
    refusal = Refusal(kind=RefusalKind.CONFLICT, message="Secret pong-tokens exists", at=BEGIN)
    world.known.refusals["Secret"] = refusal
    for _ in range(3):
        plan = world.step()
    assert (of_kind(plan.actions, orders.CreatePod), world.condition("Accepted")) == ([], "False/NameConflict")
    assert world.job.status.epoch == 0


def test_secret_is_the_jobs_own_once_it_was_claimed() -> None:
    # An operator that was killed right after the creation knows nothing of it.
    scene = Scene()
    scene.api.put("Secret", "pong-tokens")
    scene.do(orders.CreateTokens())
    assert (scene.state.has_tokens, scene.state.refusals) == (True, {})


def test_changed_secret_goes_with_its_owner_and_is_made_again() -> None:
    scene = Scene()
    scene.do(orders.CreateTokens(claim=CLAIM))
    scene.do(orders.CreateTokens())
    assert scene.state.refused_since is None
    del scene.api.requests[:]
    scene.do(orders.CreateTokens(is_wrong=True))
    assert scene.api.requests == ["TRY pong-tokens", "GET pong-tokens", "DELETE pong-tokens"]
    assert scene.state.refused_since is not None, "the new one has its time"
    del scene.api.stored["Secret", "pong-tokens"]  # the garbage collector's work
    scene.do(orders.CreateTokens())
    assert {kind for kind, name in scene.api.stored if name == "pong-tokens"} == {"ConfigMap", "Secret"}


def test_secret_of_a_strangers_owner_is_left_alone() -> None:
    scene = Scene()
    scene.api.put("Secret", "pong-tokens")
    scene.do(orders.CreateTokens(is_wrong=True))
    scene.api.put("ConfigMap", "pong-tokens", ownerReferences=[{**EARLIER, "name": "other"}])
    scene.do(orders.CreateTokens(is_wrong=True))
    assert "DELETE pong-tokens" not in scene.api.requests
    del scene.api.stored["Secret", "pong-tokens"]
    scene.do(orders.CreateTokens())
    assert scene.refusal("Secret")[0] == "NameConflict"


# -- one name twice in a row -----------------------------------------------------------------------------------------


def test_service_of_an_earlier_job_is_waited_for() -> None:
    scene = Scene()
    service = services(JOB, epoch=1)[1]
    scene.api.put("Service", "pong-api", ownerReferences=[EARLIER])
    scene.do(orders.ApplyChild(manifest=service))
    words = "Service pong-api is left over from an earlier job of this name; waiting for Kubernetes to delete it"
    assert scene.refusal("Service") == ("NameNotFreeYet", words)
    del scene.api.stored["Service", "pong-api"]
    scene.age()
    scene.do(orders.ApplyChild(manifest=service))
    assert (scene.state.refusals, ("Service", "pong-api") in scene.cache.record(JOB.uid).children) == ({}, True)


def test_name_that_is_about_to_be_free_is_looked_at_every_second() -> None:
    world = World()
    world.settle()
    world.children.pop(("Service", "pong-api"))
    for count in range(1, 100):
        refusal = Refusal(kind=RefusalKind.LEAVING, message="Service pong-api is left", at=world.now, count=count)
        world.known.refusals["Service"] = refusal
        plan = world.step()
        assert (of_kind(plan.actions, orders.ApplyChild), plan.due) == (
            [],
            world.now.replace(second=world.now.second + 1),
        )
        assert world.condition("Scheduled") == "False/NameNotFreeYet"
        world.tick(1)
        if count == 3:
            break
    assert len(of_kind(world.plan().actions, orders.ApplyChild)) == 1


def test_head_of_an_earlier_job_that_drains_is_passed_over() -> None:
    scene, world = Scene(), World()
    order = new_head(world)
    since = "2026-01-01T00:00:00Z"
    scene.api.put("Pod", "pong-head-1", ownerReferences=[EARLIER], deletionTimestamp=since)
    document = {"apiVersion": API_VERSION, "kind": KIND, "spec": JOB.templates.document}
    own = {"name": "pong", "namespace": "team-a", "uid": JOB.uid, "resourceVersion": "1"}
    scene.cache.see({**document, "metadata": own})
    scene.do(order)
    assert (scene.state.refusals, scene.cache.record(JOB.uid).epoch) == ({}, 1)
    world.epoch = scene.cache.record(JOB.uid).epoch
    (order,) = (order for order in of_kind(world.plan().actions, orders.CreatePod) if order.owner == "head")
    assert order.manifest["metadata"]["name"] == "pong-head-2"


def test_pod_of_another_owner_is_a_name_conflict() -> None:
    scene = Scene()
    scene.api.put("Pod", "pong-head-1")
    scene.do(new_head(World()))
    words = "Pod pong-head-1 exists and belongs to another owner; delete it, or rename the job"
    assert scene.refusal("head") == ("NameConflict", words)


# -- labels that others take away ------------------------------------------------------------------------------------


def test_child_that_lost_its_labels_is_applied_once() -> None:
    scene = Scene()
    service = services(JOB, epoch=1)[1]
    scene.do(orders.ApplyChild(manifest=service))
    # A watch that selects by label tells of a deletion, with the labels as they were.
    lost = scene.api.keep({**service, "metadata": {**service["metadata"], "labels": {}}})
    scene.cache.see(
        {**lost, "metadata": {**lost["metadata"], "labels": service["metadata"]["labels"]}}, is_deleted=True
    )
    assert scene.cache.record(JOB.uid).children == {}
    before = len(scene.api.requests)
    scene.do(orders.ApplyChild(manifest=service))
    assert scene.api.requests[before:] == ["GET pong-api", "APPLY pong-api"]
    assert list(scene.cache.record(JOB.uid).children) == [("Service", "pong-api")]


def test_label_that_others_changed_is_put_right() -> None:
    world = running()
    service = services(JOB, epoch=1)[1]
    changed = {**service["metadata"]["labels"], "app.kubernetes.io/instance": "else"}
    key = ("Service", "pong-api")
    world.children[key] = digest_of({**service, "metadata": {**service["metadata"], "labels": changed}})
    assert [order.manifest["metadata"]["name"] for order in of_kind(world.plan().actions, orders.ApplyChild)] == [
        "pong-api"
    ]
    world.settle()
    more = {**service["metadata"]["labels"], "team": "blue"}
    world.children[key] = digest_of({**service, "metadata": {**service["metadata"], "labels": more}})
    assert not changes(world.plan())


# -- refused changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "kind"), [(403, "Forbidden"), (400, "Forbidden"), (500, "ApiServerError")])
def test_refused_deletion_of_a_pod_is_kept_for_this_pod(code: int, kind: str) -> None:
    scene, world = Scene(), running()
    first, second = world.live()
    for pod in (first, second):
        scene.api.put("Pod", pod.name)
    scene.api.refused[f"DELETE {first.name}"] = code
    scene.do(*(orders.DeletePod(pod=pod, why="a test") for pod in (first, second)))
    assert scene.refusal(f"pod/{first.name}") == (
        kind,
        f"cannot delete pod {first.name}: {first.name} is not to be touched",
    )
    assert [name for _, name in scene.api.stored] == [first.name]
    scene.state.forget_refusals({second.name})
    assert scene.state.refusals == {}


def test_pod_that_may_not_be_deleted_waits_and_others_do_not() -> None:
    world = running(runPolicy={"maxUnavailable": 2})
    first, second = world.live()
    at = world.now + timedelta(seconds=0.4)
    world.known.refusals[f"pod/{first.name}"] = Refusal(kind=RefusalKind.FORBIDDEN, message="cannot delete pod", at=at)
    world.edit(workerGroups=[{"name": "cpu", "template": {"metadata": {"labels": {"a": "b"}}}}])
    world.step()
    plan = world.step()
    assert [order.pod.name for order in of_kind(plan.actions, orders.DeletePod)] == [second.name]
    assert (world.condition("Accepted"), world.message("Accepted")) == ("False/Forbidden", "cannot delete pod")
    over = at + timedelta(seconds=30)
    assert plan.due is not None
    later = world.plan(now=over)
    assert later.due is None or later.due > over, "no hot loop until the next whole second"


def test_missing_cert_manager_is_named() -> None:
    scene = Scene()
    job = make_job(head={"tls": {"certManager": {"issuerRef": {"name": "ca"}}}})
    (certificate,) = certificates(job)
    # Of a kind that is not installed, every path is unknown.
    scene.api.refused["APPLY pong-tls"] = 404
    scene.do(orders.ApplyChild(manifest=certificate))
    words = "this cluster has no kind Certificate; install cert-manager, or give head.tls.secretName"
    assert scene.refusal("Certificate") == ("Forbidden", f"Certificate pong-tls: {words}")
    world = World(head={"tls": {"certManager": {"issuerRef": {"name": "ca"}}}})
    world.settle()
    world.known.refusals["Certificate"] = scene.state.refusals["Certificate"]
    world.settle()
    assert world.condition("Accepted") == "False/Forbidden"
    assert world.message("Accepted") == f"Certificate pong-tls: {words}"


# -- Kueue ------------------------------------------------------------------------------------------------------


def queued() -> tuple[Scene, World]:
    """A job whose Workload is not applied yet."""
    world = World(queue="team")
    for _ in range(4):
        world.step()
        if world.kueue.raw is not None:
            break
    return Scene(), world


def test_kind_workload_that_does_not_exist_is_explained() -> None:
    scene, world = queued()
    (order,) = [a for a in of_kind(world.done, orders.ApplyChild) if a.manifest["kind"] == "Workload"]
    name = order.manifest["metadata"]["name"]
    scene.api.refused[f"APPLY {name}"] = 404
    scene.do(order)
    words = "this cluster has no kind Workload; install Kueue 0.15 or newer, or remove the label "
    kind, message = scene.refusal("Workload")
    assert (kind, message) == ("Forbidden", f"Workload {name}: {words}kueue.x-k8s.io/queue-name from the job")


def test_workload_that_kueue_wrote_meanwhile_is_left_alone() -> None:
    scene, world = queued()
    assert world.kueue.raw is not None
    raw = scene.api.keep(world.kueue.raw)
    found = read_workload(raw)
    scene.api.keep({**raw, "status": {"conditions": []}})  # Kueue's, unseen
    scene.do(orders.PatchWorkload(workload=found, status={"reclaimablePods": []}))
    assert (scene.api.stored["Workload", found.name]["status"], scene.state.refusals) == ({"conditions": []}, {})
    newer = read_workload(scene.api.stored["Workload", found.name])
    scene.do(orders.PatchWorkload(workload=newer, status={"reclaimablePods": []}))
    assert scene.api.stored["Workload", found.name]["status"] == {"conditions": [], "reclaimablePods": []}
    assert scene.api.requests[-1] == f"PATCH {found.name}/status"


def test_missing_flavor_is_explained_and_an_old_one_forgotten() -> None:
    scene = Scene()
    scene.do(orders.ReadQueueObject(kind="ResourceFlavor", name="spot", admission="a"))
    words = "cannot read ResourceFlavor spot: there is no ResourceFlavor spot; create it"
    assert scene.refusal("ResourceFlavor") == ("Forbidden", words)
    scene.state.refusals.clear()  # it is due again
    scene.api.keep({"kind": "ResourceFlavor", "metadata": {"name": "spot"}, "spec": {"nodeLabels": {"pool": "a"}}})
    for admission in ("b", "c"):
        scene.do(orders.ReadQueueObject(kind="ResourceFlavor", name="spot", admission=admission))
    found = {key: placement.node_selector for key, placement in scene.state.flavors.items()}
    assert (found, scene.state.refusals) == ({("spot", "c"): {"pool": "a"}}, {})


# -- the status ------------------------------------------------------------------------------------------------------


def test_late_status_never_overwrites_a_newer_one() -> None:
    scene = Scene()
    version = scene.api.put(KIND, "pong", uid="j")["metadata"]["resourceVersion"]
    seen = Identity(name="pong", namespace="team-a", uid="j", resource_version=version)
    asyncio.run(scene.executor.write_status(seen, CollectorJobStatus(phase="Completed")))
    with pytest.raises(KubeConflict):
        asyncio.run(scene.executor.write_status(seen, CollectorJobStatus(phase="Running")))
    assert scene.api.stored[KIND, "pong"]["status"]["phase"] == "Completed"


def test_end_is_never_taken_back() -> None:
    def condition(kind: Any, status: Any, reason: str) -> Condition:
        return Condition(type=kind, status=status, reason=reason, last_transition_time=BEGIN)

    ended = condition("Completed", "True", "AllFramesDelivered")
    before = CollectorJobStatus(conditions=(condition("Ready", "True", "EnoughWorkers"), ended))
    after = merge(before, [Fact(type="Ready", status="False", reason="TooFewWorkers")], generation=1, now=NOW)
    assert [(found.type, found.status) for found in after] == [("Ready", "False"), ("Completed", "True")]


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
    scene, (code, message, kind) = Scene(), ANSWERS[name]
    scene.api.refused = {"POST": code, "TRY": code}
    scene.api.refusal = {"message": message, "details": {"causes": [CAUSES[name]] if name in CAUSES else []}}
    check = of_kind(World().plan().actions, orders.CheckTemplate)[0]
    scene.do(orders.CreatePod(owner="cpu", manifest=check.manifest), check)
    assert scene.refusal("cpu") == (kind.value, message)
    # A template is blamed for what is its own fault alone.
    verdict = scene.state.verdicts.get(check.template)
    error = message if kind in (INVALID, NO_RIGHT) else ""
    assert (verdict.error if verdict is not None else None) == (None if kind is SERVER else error)
