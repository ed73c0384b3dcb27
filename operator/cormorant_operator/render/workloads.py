"""A job's Workload as JSON, and the parts of its status that the operator writes."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cormorant_operator import names
from cormorant_operator.job import Job
from cormorant_operator.names import Manifest
from cormorant_operator.pods import write_time
from cormorant_operator.render.children import child
from cormorant_operator.workload import Workload

_REQUEUED = ("Preempted", "NodeFailures")
"""Evictions after which Kueue queues a Workload again at once; after others Kueue chooses the time itself."""
_MAX_MESSAGE = 32768


def pod_set(name: str, pod: Manifest, *, count: int, least: int | None = None) -> dict[str, Any]:
    """`count` pods like `pod`; `least`: fewest that the job starts with; None: all of them."""
    return {
        "name": name,
        "count": count,
        **({"minCount": least} if least is not None else {}),
        "template": {
            "metadata": {key: pod["metadata"][key] for key in ("labels", "annotations")},
            "spec": pod["spec"],
        },
    }


def workload(job: Job, *, pod_sets: Sequence[Mapping[str, Any]], digest: str, priority: int | None) -> Manifest:
    """The Workload of a job with a queue. `priority`: value of the queue's priority class; None: it has none."""
    spec: dict[str, Any] = {"queueName": job.queue, "podSets": pod_sets}
    if priority is not None:
        spec["priority"] = priority
        spec["priorityClassRef"] = {
            "group": "kueue.x-k8s.io",
            "kind": "WorkloadPriorityClass",
            "name": job.priority_class,
        }
    name = names.workload(job.name, job.uid)
    manifest = child(job, "Workload", name, {"spec": spec}, api_version="kueue.x-k8s.io/v1beta2")
    metadata = manifest["metadata"]
    metadata["labels"] |= {names.QUEUED_JOB_UID: job.uid}
    metadata["annotations"] = {names.REQUEST: digest}
    return manifest


def released(found: Workload, *, at: datetime) -> dict[str, Any]:
    """Status of an evicted Workload whose pods are gone: Kueue may give its quota to others and queue it again."""
    evicted = found.condition("Evicted")
    reason, words = evicted.get("reason") or "Pending", evicted.get("message", "")
    is_requeued = reason in _REQUEUED
    news = [
        condition("QuotaReserved", is_true=False, reason="Pending", message=words),
        condition("Admitted", is_true=False, reason="NoReservation", message="The workload has no reservation"),
        condition("Requeued", is_true=is_requeued, reason=reason, message=words),
    ]
    if found.condition("PodsReady"):
        news.append(condition("PodsReady", is_true=False, reason="WaitForStart", message="the pods were deleted"))
    return {"admission": None, "reclaimablePods": None, "conditions": merged(found, news, at=at)}


def condition(kind: str, *, is_true: bool, reason: str, message: str) -> dict[str, str]:
    status = "True" if is_true else "False"
    return {"type": kind, "status": status, "reason": reason, "message": message[:_MAX_MESSAGE]}


def merged(found: Workload, news: Sequence[Mapping[str, str]], *, at: datetime) -> list[Mapping[str, Any]]:
    """All conditions of a Workload, updated by `news`."""
    conditions = {old["type"]: old for old in found.conditions}
    for new in news:
        before = conditions.pop(new["type"], {})
        since = before["lastTransitionTime"] if before.get("status") == new["status"] else write_time(at)
        conditions[new["type"]] = {**new, "lastTransitionTime": since}
    return list(conditions.values())
