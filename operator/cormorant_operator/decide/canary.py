"""The canary: a small pod with the new image, created before a working head is replaced. If the image cannot be pulled,
a condition says so and the job continues unchanged.

    new image -> canary created -> its container ran: the image is verified -> the head is replaced
                                -> refused or not started: a condition says so; nothing is replaced
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cormorant_contract.children import HEAD
from cormorant_operator import names
from cormorant_operator.decide.plan import Action, CreatePod, DeletePod
from cormorant_operator.decide.view import View
from cormorant_operator.names import Manifest
from cormorant_operator.observed import Pod

_RESOURCES = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "1", "memory": "128Mi"}}
_AGAIN_S = 30.0
"""Delay before another canary, after a kubelet rejected or evicted one."""
_PLACED = ("nodeSelector", "affinity", "tolerations", "imagePullSecrets", "securityContext", "schedulerName")
"""Fields that decide where a head runs, and with which permissions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTrial:
    """Actions to verify the image of the next head."""

    actions: tuple[Action, ...] = ()
    is_over: bool = False
    """The image is verified, or need not be."""
    due: datetime | None = None


def try_image(view: View, head: Manifest) -> ImageTrial:
    """Verify that the image of the next head, `head`, can be pulled."""
    live = view.live_head
    image = _container(head)["image"]
    if live is None or not live.is_ready or live.image == image:
        return ImageTrial(is_over=True)
    canary = current(view)
    if canary is None:
        if view.refused_until(names.CANARY) is not None:
            return ImageTrial()
        return ImageTrial(actions=(CreatePod(owner=names.CANARY, manifest=_canary(view, head)),))
    if canary.phase == "Running" or canary.exit_code is not None:
        return ImageTrial(is_over=True)
    if canary.is_terminal and not canary.is_terminating:
        again = view.after(canary.created, _AGAIN_S)
        if again > view.now:
            return ImageTrial(due=again)
        return ImageTrial(actions=(DeletePod(pod=canary, why="it never started"),))
    return ImageTrial()


def current(view: View) -> Pod | None:
    return next((pod for pod in view.canaries if pod.template == view.templates.head), None)


def tidy_canaries(view: View) -> tuple[Action, ...]:
    """Delete canaries of other templates, or of the one that the live head has."""
    live = view.live_head
    is_wanted = live is not None and live.template != view.templates.head
    kept = current(view) if is_wanted else None
    return tuple(
        DeletePod(pod=pod, why="its image was verified")
        for pod in view.canaries
        if pod is not kept and not pod.is_terminating
    )


def _canary(view: View, head: Manifest) -> Manifest:
    job, metadata, spec = view.job, head["metadata"], head["spec"]
    ours = _container(head)
    container = {key: ours[key] for key in ("image", "imagePullPolicy", "securityContext") if key in ours}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.canary_pod(job.name, job.uid, view.templates.head),
            "namespace": metadata["namespace"],
            "labels": {
                **names.child_labels(job.name, job.uid, role=names.CANARY),
                names.TEMPLATE: view.templates.head,
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
                {**container, "name": names.CANARY, "command": ["python", "-c", ""], "resources": _RESOURCES}
            ],
        },
    }


def _container(pod: Manifest) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(item for item in pod["spec"]["containers"] if item["name"] == HEAD)
    return found
