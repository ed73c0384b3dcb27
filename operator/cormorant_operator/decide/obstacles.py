"""Why pods do not run, for the conditions `Scheduled` and `Accepted`; and which workers fit."""

from collections.abc import Mapping
from datetime import datetime
from functools import partial

from cormorant_contract.children import HEAD
from cormorant_operator import names
from cormorant_operator.decide.view import View
from cormorant_operator.job import Fact
from cormorant_operator.job_state import RefusalKind
from cormorant_operator.pods import Obstacle, Pod
from cormorant_operator.render.children import budgets, certificates

_QUEUE_KINDS = ("Workload", "ResourceFlavor", "WorkloadPriorityClass")
_SCHEDULING = (RefusalKind.QUOTA, RefusalKind.NAMESPACE, RefusalKind.SERVER, RefusalKind.LEAVING)
_NOT_ACCEPTED, _NOT_SCHEDULED = partial(Fact, "Accepted", "False"), partial(Fact, "Scheduled", "False")


def acceptance_trouble(view: View) -> Fact | None:
    """Why the API server rejects the manifest."""
    owners = [HEAD, *(group.name for group in view.groups)]
    for owner, template in zip(owners, view.all_templates, strict=True):
        verdict = view.verdict(template)
        if verdict is not None and verdict.error:
            return _NOT_ACCEPTED(RefusalKind.INVALID.value, f"pod template of {owner}: {verdict.error}")
    for pod in view.canaries:
        if pod.is_live and pod.obstacle is not Obstacle.NONE and _is_missing(view, names.CANARY):
            words = f"the new image is not verified yet, so nothing was replaced: {pod.name}: {pod.obstacle_message}"
            return _NOT_ACCEPTED(pod.obstacle.value, words)
    for owner, refusal in sorted(view.state.refusals.items()):
        if refusal.kind not in _SCHEDULING and _is_missing(view, owner):
            return _NOT_ACCEPTED(refusal.kind.value, refusal.message)
    return None


def scheduling_trouble(view: View) -> Fact | None:
    """Why a pod is not scheduled, or its image is not pulled."""
    if (queued := _queue_trouble(view)) is not None:
        return queued
    for owner, refusal in sorted(view.state.refusals.items()):
        if refusal.kind in _SCHEDULING and _is_missing(view, owner):
            return _NOT_SCHEDULED(refusal.kind.value, refusal.message)
    if (volume := _volume_trouble(view)) is not None:
        return volume
    stuck = [pod for pod in view.examined if pod.is_live and pod.obstacle is not Obstacle.NONE and pod.role != "canary"]
    if not stuck:
        return None
    first = stuck[0]
    others = f"; {len(stuck)} pods are waiting" if len(stuck) > 1 else ""
    return _NOT_SCHEDULED(first.obstacle.value, f"{first.name}: {first.obstacle_message}{others}")


def is_waiting_for_room(view: View) -> bool:
    """Whether the pods that the job still needs are unscheduled, or refused by the API server."""
    head = view.live_head
    if head is None or not head.is_ready:
        return head is not None and (not head.is_scheduled or _volume_trouble(view) is not None)
    workers = (pod for pods in view.examined_workers.values() for pod in pods if pod.is_live)
    return any(not pod.is_scheduled for pod in workers) or any(
        refusal.kind in _SCHEDULING and owner in view.sizes and _is_missing(view, owner)
        for owner, refusal in view.state.refusals.items()
    )


def _queue_trouble(view: View) -> Fact | None:
    """Why a job with a queue does not have all its pods: Kueue did not admit it."""
    queue, workload = view.job.queue, view.record.workload
    is_whole = view.live_head is not None and not any(_is_missing(view, group.name) for group in view.groups)
    if not queue or view.may_create or is_whole:
        return None
    if view.is_reshaped:
        words = "it holds quota for the resources of an earlier manifest; suspend and resume the job for new quota"
    else:
        words = (
            workload.words_of("Admitted" if workload.is_reserved else "QuotaReserved") if workload is not None else ""
        )
    return _NOT_SCHEDULED("WaitingForQuota", f"queue {queue}: {words or 'Kueue has not answered yet'}")


def _volume_trouble(view: View) -> Fact | None:
    """A head that waits for a volume that Kubernetes does not detach from a lost node by itself."""
    head, claim = view.live_head, view.job.spec.head.persistence.claim_name
    lost = next((pod for pod in view.heads if pod.is_terminating and view.is_lost(pod)), None)
    if head is None or head.is_ready or not head.is_scheduled or not claim or lost is None:
        return None
    node = lost.node or "of that pod"
    return _NOT_SCHEDULED(
        reason="VolumeOnLostNode",
        message=f"{head.name} may be waiting for claim {claim}: {lost.name} is on the lost node {node}, and a "
        "ReadWriteOnce volume stays attached to it. Once you are sure that the node is off, run: "
        f"kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
    )


def is_late(view: View, pod: Pod) -> bool:
    """Whether a pod has been unschedulable for longer than the manifest allows."""
    at = late_at(view, pod)
    return at is not None and view.now >= at


def late_at(view: View, pod: Pod) -> datetime | None:
    """When an unschedulable pod exceeds the manifest's limit."""
    limit = view.policy.unschedulable_after_seconds
    if not limit or pod.role == "canary" or not pod.is_live or pod.obstacle is not Obstacle.UNSCHEDULABLE:
        return None
    return view.after(pod.created, limit)


def fit(view: View) -> tuple[Mapping[str, int], Mapping[str, tuple[int, ...]]]:
    """Slots in which the head should expect workers: the size of each group, and the empty indices below its highest
    worker, ascending; groups without empty ones are left out.

    With onUnschedulable ScaleToFit, slots whose pods found no node in time are left out, if enough remain. Their pods
    stay: they keep their place in the scheduler's queue, and count once they have a node.
    """
    if view.policy.on_unschedulable != "ScaleToFit":
        return view.sizes, {}
    sizes, empty = dict(view.sizes), {}
    for group in view.groups:
        top = view.sizes[group.name]
        live = ((slot.index, slot.live) for slot in view.wanted_slots(group.name))
        late = [index for index, pod in live if pod is not None and is_late(view, pod)]
        while late and late[-1] == top - 1:
            top = late.pop()
        if top - len(late) >= view.fewest[group.name]:
            sizes[group.name] = top - len(late)
            if late:
                empty[group.name] = tuple(late)
    return sizes, empty


def _is_missing(view: View, owner: str) -> bool:
    """Whether the refused object is still needed and missing."""
    if owner == HEAD:
        return view.live_head is None
    if owner == names.CANARY:
        return view.live_head is not None and view.live_head.template != view.job.templates.head
    if owner == "Pod":
        return any(view.verdict(template) is None and not view.is_proven(template) for template in view.all_templates)
    if owner in _QUEUE_KINDS:
        return bool(view.job.queue)
    kind, _, name = owner.partition("/")
    if name:
        return any((member.kind, member.name) == (kind, name) for member in view.record.members.values())
    if kind in ("Certificate", "PodDisruptionBudget", "PodGroup"):
        # The manifest may ask for none by now.
        asked = (*certificates(view.job), *budgets(view.job, workers=1), *view.pod_groups)
        return any(manifest["kind"] == kind for manifest in asked)
    if owner not in view.sizes:
        return owner[0].isupper()  # a kind; else a group that was removed
    return any(slot.live is None for slot in view.wanted_slots(owner))
