"""Jobs with a queue: requests to Kueue, and reports to it.

    no Workload -> pending -> admitted: pods are created -> evicted: drains, gives the quota back -> pending ...
                                                         -> the job ends: Finished

Only an eviction by Kueue stops a running job: if a Workload was deleted or cannot be read, no pod is created or
deleted. A new Workload takes the place of a deleted one.
"""

from collections.abc import Iterator

from cormorant_contract.children import HEAD
from cormorant_operator import names
from cormorant_operator.decide.heads import render_head
from cormorant_operator.decide.plan import Action, ApplyChild, DeleteChild, PatchWorkload, QueueKind, ReadQueueObject
from cormorant_operator.decide.view import View
from cormorant_operator.decide.workers import render_worker
from cormorant_operator.job import find, is_true
from cormorant_operator.render.workloads import condition, merged, pod_set, released, workload
from cormorant_operator.workload import Workload


def queue_actions(view: View) -> Iterator[Action]:
    """Actions that bring the job's Workload up to date."""
    queue, found = view.job.queue, view.record.workload
    if view.refused_until("Workload") is not None:
        return
    if not queue or (view.job.spec.suspend and not view.job.is_over):
        if found is not None and (not queue or not view.has_pods):
            yield DeleteChild(kind="Workload", name=found.name)
    elif view.job.is_over:
        uses_quota = any(not pod.is_terminal and not view.is_lost(pod) for pod in view.pods)
        if found is not None and not found.holds("Finished") and not uses_quota:
            yield _finish(view, found)
    elif found is None or not found.is_reserved:
        yield from _request(view, found)
    elif found.holds("Evicted"):
        if not view.has_pods:
            yield PatchWorkload(workload=found, status=released(found, at=view.now))
    elif found.is_admitted:
        for name in view.unread_flavors:
            yield from _read(view, "ResourceFlavor", name, admission=found.admission)
        yield from _report(view, found)


def _counts(view: View) -> dict[str, tuple[int, int | None]]:
    """Pods of each group: the requested number, and the minimum to start with, which Kueue allows for one group only.
    An autoscaled group requests its maximum, so that it grows without queueing again.
    """
    bounds = {}
    for group in view.groups:
        scale = group.autoscale
        bounds[group.name] = (
            (scale.max_replicas, scale.min_replicas)
            if scale is not None
            else (view.job.spec.size_of(group), group.min_replicas)
        )
    elastic = view.job.spec.elastic.name
    order = sorted(bounds, key=lambda name: name != elastic)
    smaller = next((name for name in order if 1 <= (bounds[name][1] or 0) < bounds[name][0]), "")
    return {name: (count, least if name == smaller else None) for name, (count, least) in bounds.items()}


def _request(view: View, found: Workload | None) -> Iterator[Action]:
    job, counts = view.job, _counts(view)
    digest = f"{job.templates.quota}.{names.digest(job.queue, job.priority_class, counts)}"
    if found is not None and found.request == digest:
        return
    if not all(view.is_proven(template) for template in view.all_templates):
        return  # an invalid template is reported, and its Workload not changed
    priority = view.state.priorities.get(job.priority_class)
    if job.priority_class and priority is None:
        yield from _read(view, "WorkloadPriorityClass", job.priority_class)
        return
    pod_sets = [pod_set(HEAD, render_head(view, epoch=view.epoch + 1), count=1)]
    for group in view.groups:
        count, least = counts[group.name]
        pod_sets.append(pod_set(group.name, render_worker(view, group), count=count, least=least))
    yield ApplyChild(manifest=workload(job, pod_sets=pod_sets, digest=digest, priority=priority))


def _read(view: View, kind: QueueKind, name: str, *, admission: str = "") -> Iterator[Action]:
    if view.refused_until(kind) is None:
        yield ReadQueueObject(kind=kind, name=name, admission=admission)


def _report(view: View, found: Workload) -> Iterator[Action]:
    """Report PodsReady, and the quota of workers that the user removed."""
    status: dict[str, object] = {}
    is_ready, before = view.has_enough, found.condition("PodsReady")
    if is_ready != found.holds("PodsReady") and (before or is_ready):
        again = before.get("reason") in ("WaitForRecovery", "Recovered") or found.holds("PodsReady")
        reason = ("Recovered" if again else "Started") if is_ready else "WaitForRecovery"
        words = "enough pods are ready to collect" if is_ready else "too few pods are ready to collect"
        news = condition("PodsReady", is_true=is_ready, reason=reason, message=words)
        status["conditions"] = merged(found, [news], at=view.now)
    reclaimed = {group.name: _reclaimed(view, found, group.name) for group in view.groups if group.autoscale is None}
    given = {name: found.pod_sets[name].reclaimed for name in reclaimed if name in found.pod_sets}
    if any(count > given.get(name, 0) for name, count in reclaimed.items()):
        items = [{"name": name, "count": count} for name, count in reclaimed.items() if count]
        status["reclaimablePods"] = items
    if status:
        yield PatchWorkload(workload=found, status=status)


def _reclaimed(view: View, found: Workload, group: str) -> int:
    """Number of pods that the group no longer needs. It decreases only with another admission."""
    pod_set, size = found.pod_sets.get(group), view.sizes[group]
    if pod_set is None:
        return 0
    is_shrinking = any(pod.index >= size and not pod.is_terminal for pod in view.examined_workers[group])
    return pod_set.reclaimed if is_shrinking or size >= pod_set.held else pod_set.asked - size


def _finish(view: View, found: Workload) -> Action:
    is_completed = is_true(view.job.status, "Completed")
    ended = find(view.job.status, "Completed" if is_completed else "Failed")
    reason, words = "Succeeded" if is_completed else "Failed", ended.message if ended is not None else ""
    news = condition("Finished", is_true=True, reason=reason, message=words)
    return PatchWorkload(workload=found, status={"conditions": merged(found, [news], at=view.now)})
