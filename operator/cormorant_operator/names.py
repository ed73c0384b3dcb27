"""Names, labels and annotations of everything the operator makes; what the command line looks for is the contract's.

All names are computed, none is drawn: two operators that see the same world ask for the same objects.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from cormorant_contract.children import (
    ATTEMPT,
    EPOCH,
    GROUP,
    HEAD,
    INDEX,
    JOB,
    JOB_UID,
    PREFIX,
    RESTARTS,
    ROLE,
    WORKER,
    api_service,
    tokens_secret,
)

__all__ = [
    "ATTEMPT",
    "EPOCH",
    "GROUP",
    "HEAD",
    "INDEX",
    "JOB",
    "JOB_UID",
    "PREFIX",
    "RESTARTS",
    "ROLE",
    "WORKER",
    "api_service",
    "tokens_secret",
]

Manifest: TypeAlias = dict[str, Any]
"""A Kubernetes object as JSON."""

CANARY = "canary"
"""Role of a pod that tries an image, and the name of its container."""

MANAGER = "cormorant-operator"
STATUS_MANAGER = "cormorant-operator-status"
"""Field managers of server-side apply: children, and the job's status."""

MANAGED_BY = "app.kubernetes.io/managed-by"
TEMPLATE = f"{PREFIX}/template"

FAILURES = f"{PREFIX}/failures"
"""Annotation: failures in a row that came before this pod."""
BASE_IMAGE = f"{PREFIX}/base-image"
"""Annotation: the job's image when the pod was made; all pods of one Ray cluster have the same."""
RETIRING = f"{PREFIX}/retiring-since"
"""Annotation: the head was asked to let this worker finish."""
DRAINING = f"{PREFIX}/draining-since"
"""Annotation: this head was asked to drain; it is not asked to go on."""
STALLED = f"{PREFIX}/stalled-since"
"""Annotation: this head collected nothing for too long; its end counts as a failure."""

WATCHED = f"{MANAGED_BY}={MANAGER}"
"""Label selector of everything the operator makes."""


def head_pod(job: str, *, epoch: int) -> str:
    """Name of a head: one pod an epoch can exist, never two."""
    return f"{job}-head-{epoch}"


def worker_pod(job: str, uid: str, *, group: str, index: int, attempt: int) -> str:
    """Name of the pod that fills a slot for the n-th time: two creations of one attempt collide, and one wins."""
    return f"{job}-{group}-{index}-{_short(f'{uid}/{group}/{index}/{attempt}', 5)}"


def canary_pod(job: str, uid: str, template: str) -> str:
    """Name of the pod that tries the image of a template."""
    return f"{job}-canary-{_short(f'{uid}/{template}', 8)}"


def head_service(job: str) -> str:
    """Service that workers find the head's Ray by."""
    return f"{job}-head"


def network_policy(job: str) -> str:
    """Who may talk to the job's pods."""
    return f"{job}-pods"


def budget(job: str, *, role: str) -> str:
    """PodDisruptionBudget of the head, or of all workers."""
    return f"{job}-{role}"


def config_map(job: str, digest: str) -> str:
    """ConfigMap of the manifest that a head reads."""
    return f"{job}-config-{digest}"


def digest(*parts: Any) -> str:
    """Eight characters that differ when the parts, plain JSON data, do."""
    return _short(json.dumps(parts, sort_keys=True, separators=(",", ":")), 8)


def child_labels(job: str, uid: str, *, role: str = "") -> dict[str, str]:
    """Labels of everything that belongs to a job."""
    labels = {
        "app.kubernetes.io/name": "cormorant",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/part-of": "cormorant",
        MANAGED_BY: MANAGER,
        JOB: job,
        JOB_UID: uid,
    }
    return labels | ({"app.kubernetes.io/component": role, ROLE: role} if role else {})


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Those of an object's labels that are ours to write."""
    return {key: value for key, value in labels.items() if key in _OWN_LABELS}


def worker_selector(uid: str, *, group: str) -> str:
    """Label selector of a group's pods, for autoscalers."""
    return f"{JOB_UID}={uid},{GROUP}={group}"


_OWN_LABELS = child_labels("", "").keys()


def _short(text: str, length: int) -> str:
    # Base 32 in lower case: every character may stand anywhere in a name.
    raw = hashlib.sha256(text.encode()).digest()
    return base64.b32encode(raw).decode().lower()[:length]
