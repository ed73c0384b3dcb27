"""Decides about the head: one per epoch, its replacement, and its drain when the job is suspended.

epoch 1 runs -> fails                      -> backoff, epoch 2; counted
             -> is deleted, evicted, lost  -> epoch 2; not counted
             -> is outdated                -> new image verified, then replaced by epoch 2; not counted
             -> exits with 0               -> the job is complete

Before a working head is replaced by one with another image, a canary, a small pod, shows that the image can be pulled:

    new image -> canary created -> its container ran: the image is verified -> the head is replaced
                                -> refused or not started: a condition says so; nothing is replaced

A job is suspended by its spec or because Kueue evicted it. A drain is never cancelled: a job that is resumed meanwhile
continues with a new head.

    running -> draining (workers finish, learners take the rest, at most drainSeconds) -> deleting -> Suspended
"""

from collections.abc import Iterable, Mapping
from typing import Any

from cormorant_contract.children import HEAD
from cormorant_operator import names
from cormorant_operator.decide.plan import CheckNode, CreatePod, Draft, DrainHead, delete_pod, mark_pod
from cormorant_operator.decide.progress import frames_settled
from cormorant_operator.decide.view import View
from cormorant_operator.names import Manifest
from cormorant_operator.pods import RESET_AFTER_S, Pod, next_attempt_at
from cormorant_operator.render.pods import PodOrigin, head_pod

_CANARY_RESOURCES = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "1", "memory": "128Mi"}}
_AGAIN_S = 30.0
"""Delay before another canary, after a kubelet rejected or evicted one."""
_NODE_LASTS_S = 10.0
"""How long a node check is valid."""
_PLACED = ("nodeSelector", "affinity", "tolerations", "imagePullSecrets", "securityContext", "schedulerName")
"""Fields that determine where a head runs, and with which permissions."""


def plan_head(view: View, draft: Draft) -> None:
    """Keep one live head with the current template."""
    live, newest = view.live_head, view.newest_head
    _tidy(view, draft)
    if live is not None:
        draft.epoch, draft.is_head_coming = live.epoch, True
        if (
            live.template != view.job.templates.head
            # A running job is not torn down for an invalid manifest, nor by an operator that knows fewer fields than
            # the one that created its pods.
            and not view.job.unknown
            and view.may_create
            and all(map(view.is_proven, view.all_templates))
        ):
            if _is_image_verified(view, draft, live):
                draft.updating = "ReplacingHead"
                draft.actions.append(delete_pod(live, "its template changed"))
                return
            draft.updating = "TryingImage"
        return
    if not view.is_proven(view.job.templates.head) or not view.may_create:
        return
    if (until := view.refused_until(HEAD)) is not None:
        draft.dues.append(until)
        return
    draft.is_head_coming = True
    if newest is not None:
        # A terminating head lets learners acknowledge the batches they hold, and counts them. One that never ran holds
        # no batches, and one on a lost node cannot report.
        is_leaving = newest.is_terminating and newest.phase == "Running" and not view.is_lost(newest)
        not_before = newest.deletion_deadline if is_leaving else None
        if newest.must_wait and not newest.is_terminating:
            not_before = next_attempt_at(newest)
        if not_before is not None and not_before > view.now:
            draft.dues.append(not_before)
            _check_nodes(view, draft, [newest])
            return
    draft.epoch += 1
    draft.actions.append(CreatePod(owner=HEAD, manifest=render_head(view, epoch=draft.epoch)))


def render_head(view: View, *, epoch: int) -> Manifest:
    origin = PodOrigin(
        base_image=view.job.spec.image or view.defaults.image,
        cuda_image=view.next_cuda_image,
        failures=view.head_failures,
        placement=view.placement(HEAD),
        gang=view.gang,
    )
    answer = view.state.answer
    return head_pod(
        view.job,
        view.defaults,
        origin,
        epoch=epoch,
        # Unacknowledged frames are lost with their head; the next one collects them again.
        floor_frames=frames_settled(view),
        version=max(view.job.status.weights.version, answer.version if answer is not None else 0),
    )


def _check_nodes(view: View, draft: Draft, pods: Iterable[Pod]) -> None:
    """Check nodes whose pods were evicted by a taint: if they are lost, the end of these pods is never confirmed."""
    for name in sorted({pod.node for pod in pods if pod.is_taint_evicted and pod.node and not view.is_lost(pod)}):
        fact = view.state.nodes.get(name)
        valid_until = view.after(fact.at, _NODE_LASTS_S) if fact is not None else view.now
        if view.now >= valid_until:
            draft.actions.append(CheckNode(name=name))
        else:
            draft.dues.append(valid_until)


def _tidy(view: View, draft: Draft) -> None:
    """Delete earlier heads and unused canaries. Keeps the last ended head for its log until its successor has run for a
    while.
    """
    live, earlier = view.live_head, view.heads[:-1]
    ended = [pod for pod in earlier if pod.is_terminal and not pod.is_terminating]
    over = [pod for pod in earlier if pod.is_live] + ended[:-1]
    draft.actions += [delete_pod(pod, "a newer head took over") for pod in over]
    if ended and ended[-1].has_sidecar:
        # Its failure count is in the annotations of its successor.
        draft.actions.append(delete_pod(ended[-1], "it ended but its sidecar is still running"))
    elif ended and live is not None and live.ready_since is not None:
        until = view.after(live.ready_since, RESET_AFTER_S)
        if view.now < until:
            draft.dues.append(until)
        else:
            draft.actions.append(delete_pod(ended[-1], "its successor is healthy"))
    wanted = _canary_of(view) if live is not None and live.template != view.job.templates.head else None
    draft.actions += [
        delete_pod(pod, "its image was verified")
        for pod in view.canaries
        if pod is not wanted and not pod.is_terminating
    ]


# -- the canary ------------------------------------------------------------------------------------------------


def _is_image_verified(view: View, draft: Draft, live: Pod) -> bool:
    """Whether the image of the next head can be pulled, or need not be verified; if not, a canary finds out."""
    head = render_head(view, epoch=view.epoch + 1)
    if not live.is_ready or live.image == _container(head)["image"]:
        return True
    canary = _canary_of(view)
    if canary is None:
        if view.refused_until(names.CANARY) is None:
            draft.actions.append(CreatePod(owner=names.CANARY, manifest=_canary(view, head)))
    elif canary.phase == "Running" or canary.exit_code is not None:
        return True
    elif canary.is_terminal and not canary.is_terminating:
        again = view.after(canary.created, _AGAIN_S)
        if again > view.now:
            draft.dues.append(again)
        else:
            draft.actions.append(delete_pod(canary, "it never started"))
    return False


def _canary_of(view: View) -> Pod | None:
    return next((pod for pod in view.canaries if pod.template == view.job.templates.head), None)


def _canary(view: View, head: Manifest) -> Manifest:
    job, metadata, spec = view.job, head["metadata"], head["spec"]
    ours = _container(head)
    container = {key: ours[key] for key in ("image", "imagePullPolicy", "securityContext") if key in ours}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.canary_pod(job.name, job.uid, view.job.templates.head),
            "namespace": metadata["namespace"],
            "labels": {
                **names.child_labels(job.name, job.uid, role=names.CANARY),
                names.TEMPLATE: view.job.templates.head,
            },
            "ownerReferences": metadata["ownerReferences"],
        },
        "spec": {
            **{key: spec[key] for key in _PLACED if key in spec},
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {**container, "name": names.CANARY, "command": ["python", "-c", ""], "resources": _CANARY_RESOURCES}
            ],
        },
    }


def _container(pod: Manifest) -> Mapping[str, Any]:
    container: Mapping[str, Any] = next(item for item in pod["spec"]["containers"] if item["name"] == HEAD)
    return container


# -- suspension ------------------------------------------------------------------------------------------------


def plan_suspension(view: View, draft: Draft) -> None:
    """Drain the head, then delete all pods. Leaves `draft.suspension` at "no" if the job is not to be suspended."""
    head, is_wanted = view.live_head, view.is_stopping
    if head is None:
        if is_wanted:
            draft.suspension = "deleting" if view.has_pods else "suspended"
            _delete_all(view, draft, "head", "worker", "canary")
            _check_nodes(view, draft, view.record.pods)
    elif head.draining_since is None and is_wanted and head.is_ready:
        draft.suspension = "draining"
        draft.actions += [mark_pod(head, names.DRAINING, view.now), DrainHead(pod=head)]
    elif head.draining_since is not None or is_wanted:
        # A head that is not ready holds nothing to drain. A draining head keeps its full drain time, whatever its probe
        # reports.
        until = view.drained_by(head.draining_since) if head.draining_since else view.now
        if view.now >= until:
            draft.suspension = "deleting"
            _delete_all(view, draft, "head", *(("worker",) if is_wanted else ()))
            return
        draft.suspension = "draining"
        draft.dues.append(until)
        if view.answer is not None and view.answer.phase not in ("Draining", "Completed"):
            draft.actions.append(DrainHead(pod=head))


def _delete_all(view: View, draft: Draft, *roles: str) -> None:
    why = "the job is suspended" if view.job.spec.suspend else "Kueue evicted the job"
    going = (pod for pod in view.record.pods if pod.role in roles and not pod.is_terminating)
    draft.actions += [delete_pod(pod, why) for pod in going]
