"""Jobs with a queue: requests to Kueue, and reports to it.

    no Workload -> pending -> admitted: pods are created -> evicted: drains, gives the quota back -> pending ...
                                                         -> the job ends: Finished

Only an eviction by Kueue stops a running job: if a Workload was deleted or cannot be read, no pod is created or
deleted. A new Workload takes the place of a deleted one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cormorant_contract.children import HEAD
from cormorant_operator import names
from cormorant_operator.decide.heads import render_head
from cormorant_operator.decide.plan import Action, ApplyChild, Delete, Patch, QueueKind, ReadQueueObject
from cormorant_operator.decide.view import View
from cormorant_operator.decide.workers import render_worker
from cormorant_operator.job import find, is_true
from cormorant_operator.names import Manifest
from cormorant_operator.pods import write_time
from cormorant_operator.render.children import child
from cormorant_operator.workload import Workload

_REQUEUED = ("Preempted", "NodeFailures")
"""Evictions after which Kueue queues a Workload again at once; after others Kueue chooses the time itself."""
_MAX_MESSAGE = 32768


def queue_actions(view: View) -> Iterator[Action]:
    """Actions that bring the job's Workload up to date."""
    queue, workload, status = view.job.queue, view.record.workload, view.job.status
    if view.refused_until("Workload") is not None:
        return
    if not queue or (view.job.spec.suspend and not view.job.is_over):
        if workload is not None and (not queue or not view.has_pods):
            yield Delete(kind="Workload", name=workload.name, uid=workload.uid, why="the job needs no quota")
    elif view.job.is_over:
        uses_quota = any(not pod.is_terminal and not view.is_lost(pod) for pod in view.record.pods)
        if workload is not None and not workload.holds("Finished") and not uses_quota:
            is_completed = is_true(status, "Completed")
            ended = find(status, "Completed" if is_completed else "Failed")
            reason, words = "Succeeded" if is_completed else "Failed", ended.message if ended is not None else ""
            news = _condition("Finished", is_true=True, reason=reason, message=words)
            yield _write(workload, {"conditions": _merged(view, workload, [news])})
    elif workload is None or not workload.is_reserved:
        yield from _request(view, workload)
    elif workload.holds("Evicted"):
        if not view.has_pods:
            yield _release(view, workload)
    elif workload.is_admitted:
        for name in view.unread_flavors:
            yield from _read(view, "ResourceFlavor", name, admission=workload.admission)
        yield from _report(view, workload)


def _request(view: View, found: Workload | None) -> Iterator[Action]:
    """Create the Workload, or change one that holds no quota yet."""
    job, elastic = view.job, view.job.spec.elastic.name
    # Of each group, the requested number of pods, and the minimum to start with. An autoscaled group requests its
    # maximum, so that it grows without queueing again. Kueue allows a minimum for one group only.
    bounds = {
        group.name: (job.spec.size_of(group), group.min_replicas)
        if (scale := group.autoscale) is None
        else (scale.max_replicas, scale.min_replicas)
        for group in view.groups
    }
    order = sorted(bounds, key=lambda name: name != elastic)
    smaller = next((name for name in order if 1 <= (bounds[name][1] or 0) < bounds[name][0]), "")
    counts = {name: (count, least if name == smaller else None) for name, (count, least) in bounds.items()}
    digest = f"{job.templates.quota}.{names.digest(job.queue, job.priority_class, counts)}"
    if found is not None and found.request == digest:
        return
    if not all(view.is_proven(template) for template in view.all_templates):
        return  # an invalid template is reported, and its Workload not changed
    priority = view.state.priorities.get(job.priority_class)
    if job.priority_class and priority is None:
        yield from _read(view, "WorkloadPriorityClass", job.priority_class)
        return
    pod_sets = [_pod_set(HEAD, render_head(view, epoch=view.epoch + 1), 1, None)]
    pod_sets += [_pod_set(group.name, render_worker(view, group), *counts[group.name]) for group in view.groups]
    spec: dict[str, Any] = {"queueName": job.queue, "podSets": pod_sets}
    if priority is not None:
        kind = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": job.priority_class}
        spec |= {"priority": priority, "priorityClassRef": kind}
    name = names.workload(job.name, job.uid)
    manifest = child(job, "Workload", name, {"spec": spec}, api_version="kueue.x-k8s.io/v1beta2")
    manifest["metadata"]["labels"] |= {names.QUEUED_JOB_UID: job.uid}
    manifest["metadata"]["annotations"] = {names.REQUEST: digest}
    yield ApplyChild(manifest=manifest)


def _pod_set(name: str, pod: Manifest, count: int, least: int | None) -> dict[str, Any]:
    metadata = {key: pod["metadata"][key] for key in ("labels", "annotations")}
    fewest = {"minCount": least} if least is not None else {}
    return {"name": name, "count": count, **fewest, "template": {"metadata": metadata, "spec": pod["spec"]}}


def _read(view: View, kind: QueueKind, name: str, *, admission: str = "") -> Iterator[Action]:
    if view.refused_until(kind) is None:
        yield ReadQueueObject(kind=kind, name=name, admission=admission)


def _release(view: View, found: Workload) -> Action:
    """The pods of an evicted Workload are gone: Kueue may give its quota to others and queue it again."""
    evicted = found.condition("Evicted")
    reason, words = evicted.get("reason") or "Pending", evicted.get("message", "")
    news = [
        _condition("QuotaReserved", is_true=False, reason="Pending", message=words),
        _condition("Admitted", is_true=False, reason="NoReservation", message="The workload has no reservation"),
        _condition("Requeued", is_true=reason in _REQUEUED, reason=reason, message=words),
    ]
    if found.condition("PodsReady"):
        news.append(_condition("PodsReady", is_true=False, reason="WaitForStart", message="the pods were deleted"))
    status = {"admission": None, "reclaimablePods": None, "conditions": _merged(view, found, news)}
    return _write(found, status)


def _report(view: View, found: Workload) -> Iterator[Action]:
    """Report PodsReady, and the quota of workers that the user removed."""
    status: dict[str, object] = {}
    is_ready, before = view.has_enough, found.condition("PodsReady")
    if is_ready != found.holds("PodsReady") and (before or is_ready):
        again = before.get("reason") in ("WaitForRecovery", "Recovered") or found.holds("PodsReady")
        reason = ("Recovered" if again else "Started") if is_ready else "WaitForRecovery"
        words = "enough pods are ready to collect" if is_ready else "too few pods are ready to collect"
        news = _condition("PodsReady", is_true=is_ready, reason=reason, message=words)
        status["conditions"] = _merged(view, found, [news])
    reclaimed, is_more = [], False
    for group in view.groups:
        pod_set, size = found.pod_sets.get(group.name), view.sizes[group.name]
        if pod_set is None or group.autoscale is not None:
            continue
        # The count of pods that a group no longer needs decreases only with another admission.
        is_shrinking = any(pod.index >= size and not pod.is_terminal for pod in view.examined_workers[group.name])
        count = pod_set.reclaimed if is_shrinking or size >= pod_set.held else pod_set.asked - size
        is_more |= count > pod_set.reclaimed
        reclaimed += [{"name": group.name, "count": count}] if count else []
    if is_more:
        status["reclaimablePods"] = reclaimed
    if status:
        yield _write(found, status)


def _write(found: Workload, status: Mapping[str, object]) -> Patch:
    """Write parts of a Workload's status, unless the Workload changed since."""
    body = {"metadata": {"uid": found.uid, "resourceVersion": found.version}, "status": status}
    return Patch(kind="Workload", name=found.name, uid=found.uid, body=body, subresource="status")


def _condition(kind: str, *, is_true: bool, reason: str, message: str) -> dict[str, str]:
    status = "True" if is_true else "False"
    return {"type": kind, "status": status, "reason": reason, "message": message[:_MAX_MESSAGE]}


def _merged(view: View, found: Workload, news: Sequence[Mapping[str, str]]) -> list[Mapping[str, Any]]:
    """All conditions of a Workload, updated by `news`."""
    conditions = {old["type"]: old for old in found.conditions}
    for new in news:
        before = conditions.pop(new["type"], {})
        since = before["lastTransitionTime"] if before.get("status") == new["status"] else write_time(view.now)
        conditions[new["type"]] = {**new, "lastTransitionTime": since}
    return list(conditions.values())
