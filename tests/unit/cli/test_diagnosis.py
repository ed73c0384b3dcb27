"""Facts of a cluster and a job, and the sentence that each trouble gets."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cormorant_cli.diagnosis import ClusterFacts, JobFacts, examine_cluster, examine_job
from cormorant_cli.jobs import JobPod, read_pod

NOW = datetime(2026, 1, 2, tzinfo=UTC)
CRD = {"status": {"conditions": [{"type": "Established", "status": "True"}]}}
GPU_GROUPS = [{"name": "gpu", "device": "gpu", "replicas": 1}]
UNSCHEDULABLE = "0/3 nodes are available: 3 Insufficient cpu."


def make_node(name: str = "a", *, ready: str = "True", gpus: str = "0", cordoned: bool = False) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"nvidia.com/gpu": gpus}},
    }


def make_operator(*, replicas: int = 1, ready: int = 1, args: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "metadata": {"name": "cormorant", "namespace": "ops"},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [{"args": list(args)}]}}},
        "status": {"readyReplicas": ready},
    }


def make_job(
    *conditions: str, spec: dict[str, Any] | None = None, status: Any = None, **metadata: Any
) -> dict[str, Any]:
    """A job of an hour; a condition is written `Type=Status/Reason: message`."""
    facts = []
    for text in conditions:
        head, _, message = text.partition(": ")
        kind, _, rest = head.partition("=")
        state, _, reason = rest.partition("/")
        facts.append({"type": kind, "status": state, "reason": reason, "message": message})
    born = (NOW - timedelta(hours=1)).isoformat()
    whole = {"observedGeneration": 1, "conditions": facts, **(status or {})} if status is not False else None
    return {
        "metadata": {
            "name": "pong",
            "namespace": "rl",
            "uid": "u",
            "generation": 1,
            "creationTimestamp": born,
            **metadata,
        },
        "spec": {"env": {}, "workerGroups": [{"name": "cpu"}], **(spec or {})},
        **({"status": whole} if whole is not None else {}),
    }


def make_pod(name: str = "pong-cpu-0-x", **status: Any) -> JobPod:
    role = "head" if "head" in name else "worker"
    labels = {"cormorant.dev/role": role, "cormorant.dev/group": "cpu", "cormorant.dev/index": "0"}
    metadata = {"name": name, "uid": name, "creationTimestamp": NOW.isoformat(), "labels": labels, "namespace": "rl"}
    return read_pod({"metadata": metadata, "status": {"phase": "Pending", **status}})


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"containerStatuses": [{"image": "i", "state": {"waiting": {"reason": reason, "message": message}}}]}


def unscheduled(message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


HEALTHY = ClusterFacts(
    server="https://here", version="v1.34", namespace="rl", crd=CRD, operators=[make_operator()], nodes=[make_node()]
)
READY = make_job("Accepted=True/Accepted", "Ready=True/EnoughWorkers", status={"frames": {"collected": 1000}})
SECRET = {"data": dict.fromkeys(("read", "write", "operator", "ray"), "eA==")}


def facts_of(job: dict[str, Any], **more: Any) -> JobFacts:
    return replace(JobFacts(job=job, now=NOW, pods=[], events=[], secret=SECRET), **more)


def of_cluster(facts: ClusterFacts, job: JobFacts | None = None) -> dict[str, list[str]]:
    found = list(examine_cluster(facts, job))
    return {level: [f.sentence for f in found if f.level == level] for level in ("ok", "note", "problem")}


def of_job(facts: JobFacts) -> dict[str, list[str]]:
    found = list(examine_job(facts))
    return {level: [f.sentence for f in found if f.level == level] for level in ("ok", "note", "problem")}


def test_healthy_cluster_and_job_have_no_problem() -> None:
    assert of_cluster(HEALTHY)["problem"] == []
    found = of_job(facts_of(READY, pods=[make_pod("pong-head-1", phase="Running")], head_answer=""))
    assert found["problem"] == []
    assert found["ok"] == ["the head pong-head-1 answers and accepts the job's token", "1,000 frames collected, 0/s"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"crd": {}}, "CustomResourceDefinition of CollectorJob is not installed"),
        (
            {
                "crd": {
                    "status": {"conditions": [{"type": "NamesAccepted", "status": "False", "message": "cjob is taken"}]}
                }
            },
            "is not served: cjob is taken",
        ),
        ({"operators": []}, "the operator is not installed"),
        ({"operators": [make_operator(replicas=0, ready=0)]}, "ops/cormorant is scaled to 0"),
        (
            {
                "operators": [make_operator(ready=0)],
                "operator_pods": [
                    read_pod(
                        {
                            "metadata": {"name": "op", "namespace": "ops", "creationTimestamp": NOW.isoformat()},
                            "status": waiting("ImagePullBackOff", "no such image"),
                        }
                    )
                ],
            },
            "ops/cormorant is not running: op: ImagePullBackOff: no such image",
        ),
        (
            {"operators": [make_operator(args=("--namespace=a", "--namespace=b"))]},
            "does not watch namespace rl, only a, b",
        ),
        ({"nodes": []}, "the cluster has no nodes"),
        ({"nodes": [make_node(ready="Unknown"), make_node("b", cordoned=True)]}, "none of 2 nodes is ready"),
        ({"has_namespace": False}, "namespace rl does not exist"),
        ({"lacking": {"get secrets": "`cormorant weights`"}}, "you may not get secrets in namespace rl"),
    ],
)
def test_trouble_of_a_cluster_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    (problem,) = of_cluster(replace(HEALTHY, **change))["problem"]
    assert sentence in problem


def test_operator_outside_the_cluster_is_recognised() -> None:
    found = of_cluster(replace(HEALTHY, operators=[]), facts_of(READY))
    assert found["problem"] == []
    assert "the operator runs elsewhere" in found["note"][0]


def test_operator_of_other_namespaces_is_nobodys_trouble_here() -> None:
    others = make_operator(ready=0, args=("--namespace=a",))
    others["metadata"]["name"] = "theirs"
    found = of_cluster(replace(HEALTHY, operators=[others]), facts_of(READY))
    assert (found["problem"], len(found["note"])) == ([], 2)
    assert of_cluster(replace(HEALTHY, operators=[others, make_operator()]))["problem"] == []


def test_gpus_are_a_problem_only_where_a_group_wants_one() -> None:
    assert of_cluster(HEALTHY)["problem"] == []
    wanting = facts_of(make_job(spec={"workerGroups": GPU_GROUPS}))
    assert "no node offers nvidia.com/gpu, which the groups gpu request" in of_cluster(HEALTHY, wanting)["problem"][0]
    several = [{"name": "gpu", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]
    facts = replace(HEALTHY, nodes=[make_node(gpus="2"), make_node("b", gpus="1")])
    (problem,) = of_cluster(facts, facts_of(make_job(spec={"workerGroups": several})))["problem"]
    assert problem == "a worker requests 4 nvidia.com/gpu, and the largest node has 2"
    assert of_cluster(facts, wanting)["problem"] == []


@pytest.mark.parametrize(
    ("job", "more", "sentence"),
    [
        (make_job(status=False), {}, "no operator has reconciled rl/pong since its creation 60m ago"),
        (make_job(generation=2), {}, "has not reconciled the newest spec"),
        (make_job("Accepted=False/Forbidden: pods is forbidden"), {}, "the operator lacks a permission"),
        (make_job("Accepted=False/InvalidPodTemplate: hostNetwork"), {}, "InvalidPodTemplate: hostNetwork"),
        (make_job(spec={"suspend": True}), {}, "suspended (spec.suspend is true)"),
        (
            make_job(spec={"suspend": True}, labels={"kueue.x-k8s.io/queue-name": "q"}),
            {"workloads": []},
            "suspended (spec.suspend is true)",
        ),
        (
            make_job("Scheduled=False/WaitingForQuota: queue q: no quota left"),
            {},
            "Kueue did not admit it: queue q: no quota left",
        ),
        (
            make_job(spec={"suspend": True}, labels={"kueue.x-k8s.io/queue-name": "q"}),
            {
                "workloads": [
                    {
                        "status": {
                            "conditions": [
                                {
                                    "type": "QuotaReserved",
                                    "status": "False",
                                    "reason": "Pending",
                                    "message": "no quota left",
                                }
                            ]
                        }
                    }
                ]
            },
            "suspended by Kueue until queue q has room: Pending: no quota left",
        ),
        (
            make_job(spec={"code": {"configMap": "mine"}}),
            {"has_code": False},
            "the ConfigMap mine with its code does not exist",
        ),
        (
            make_job(spec={"head": {"persistence": {"claimName": "disk"}}}),
            {"claim": "missing"},
            "PersistentVolumeClaim disk does not exist",
        ),
        (make_job(), {"secret": "missing", "pods": [make_pod(phase="Running")]}, "the Secret pong-tokens"),
        (make_job(), {"secret": {"data": {"read": "eA=="}}}, "lacks the tokens write, operator, ray"),
        (make_job(), {"pods": [make_pod(**unscheduled(UNSCHEDULABLE))]}, "Insufficient cpu.; lower resources.requests"),
        (
            make_job(),
            {"pods": [make_pod(**unscheduled("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."))]},
            "no node has a free nvidia.com/gpu",
        ),
        (
            make_job(),
            {"pods": [make_pod(**waiting("ErrImagePull", "not found"))]},
            "ErrImagePull: not found; check the image's",
        ),
        (
            make_job("Scheduled=False/QuotaExceeded: exceeded quota: q"),
            {},
            "the namespace's quota is used up: exceeded quota: q",
        ),
        (
            make_job(),
            {"pods": [make_pod("pong-head-1", phase="Running")], "head_answer": "the head does not answer"},
            "the head does not answer; see `cormorant logs pong`",
        ),
        (make_job("Failed=True/HeadRefused: bad manifest"), {}, "failed: HeadRefused: bad manifest"),
        (make_job("Stalled=True/NoProgress"), {}, "stalled: NoProgress"),
        (make_job("Progressing=Unknown/ControlPlaneUnreachable: silent"), {}, "does a NetworkPolicy block it?"),
    ],
)
def test_trouble_of_a_job_is_one_sentence(job: dict[str, Any], more: dict[str, Any], sentence: str) -> None:
    (problem,) = of_job(facts_of(job, **more))["problem"]
    assert sentence in problem


def test_pods_that_wait_for_the_same_are_one_sentence() -> None:
    pods = [make_pod(f"pong-cpu-{i}-x", **unscheduled(UNSCHEDULABLE)) for i in range(5)]
    job = make_job(f"Scheduled=False/Unschedulable: pong-cpu-0-x: {UNSCHEDULABLE}; 5 pods are waiting")
    (problem,) = of_job(facts_of(job, pods=pods))["problem"]
    assert problem.startswith("pong-cpu-0-x and 4 other pods cannot start")


def test_pods_that_try_one_image_in_turn_are_one_sentence() -> None:
    now = make_pod("pong-cpu-0-x", **waiting("ErrImagePull", "no such image"))
    later = make_pod(
        "pong-cpu-1-x", **waiting("ImagePullBackOff", 'Back-off pulling image "i": ErrImagePull: no such image')
    )
    (problem,) = of_job(facts_of(make_job(), pods=[later, now]))["problem"]
    assert problem.startswith(
        "pong-cpu-1-x and another pod cannot start: ErrImagePull: no such image; check the image's"
    )


def test_volume_that_cannot_be_mounted_is_told_from_the_events() -> None:
    pod = make_pod(**waiting("ContainerCreating", ""))
    event = {"involvedObject": {"uid": pod.name}, "reason": "FailedMount", "message": "secret x not found"}
    (problem,) = of_job(facts_of(make_job(), pods=[pod], events=[event]))["problem"]
    assert "cannot start: FailedMount: secret x not found" in problem


def test_pause_memory_and_a_waiting_learner_are_notes() -> None:
    status = {
        "recentFailures": [{"pod": "pong-cpu-0-y", "reason": "OOMKilled", "time": NOW.isoformat(), "exitCode": 137}]
    }
    job = make_job("Paused=True/Spec", "Progressing=True/WaitingForConsumer: the queue is full", status=status)
    found = of_job(facts_of(job))
    assert found["problem"] == []
    notes = "\n".join(found["note"])
    for words in (
        "`cormorant resume pong` ends it",
        "1 pods ran out of memory",
        "workers are waiting: the queue is full",
    ):
        assert words in notes


def test_what_could_not_be_read_is_said_and_is_no_problem() -> None:
    facts = JobFacts(job=READY, now=NOW, gaps=("its pods cannot be looked at: you may not",))
    found = of_job(facts)
    assert (found["problem"], found["note"]) == ([], ["its pods cannot be looked at: you may not"])
