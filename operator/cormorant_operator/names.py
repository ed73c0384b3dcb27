"""Names, labels and annotations of the operator's objects. Those that the CLI looks for come from the contract.

All names are computed, none is random: two operators that see the same cluster ask for the same objects.
"""

import base64
import hashlib
import json
from typing import Any, TypeAlias

from cormorant_contract.children import JOB, JOB_UID, PREFIX, ROLE

Manifest: TypeAlias = dict[str, Any]
"""A Kubernetes object as JSON."""

TLS_OPTION = "--tls-cert"
"""Option in the command of a head that serves HTTPS."""

CANARY = "canary"
"""Role of a pod that verifies an image, and the name of its container."""

MANAGER = "cormorant-operator"
STATUS_MANAGER = "cormorant-operator-status"
"""Field managers of server-side apply: children, and the job's status."""

MANAGED_BY = "app.kubernetes.io/managed-by"
TEMPLATE = f"{PREFIX}/template"

FAILURES = f"{PREFIX}/failures"
"""Annotation: consecutive failures before this pod."""
BASE_IMAGE = f"{PREFIX}/base-image"
"""Annotation: the job's image when the pod was created; the same for all pods of a Ray cluster."""
CUDA_IMAGE = f"{PREFIX}/cuda-image"
"""Annotation of a head: the image of its workers with a device, if it differs from the base image."""
RETIRING = f"{PREFIX}/retiring-since"
"""Annotation: the head was asked to let this worker finish."""
DRAINING = f"{PREFIX}/draining-since"
"""Annotation: the head was asked to drain; never removed."""
STALLED = f"{PREFIX}/stalled-since"
"""Annotation: the head stalled; its end counts as a failure."""

REQUEST = f"{PREFIX}/request"
"""Annotation of a Workload: digest of the quota that it requests."""
QUEUED_JOB_UID = "kueue.x-k8s.io/job-uid"
"""Label of a Workload."""

WATCHED = f"{MANAGED_BY}={MANAGER}"
"""Label selector of everything the operator creates."""


def head_pod(job: str, *, epoch: int) -> str:
    """Name of a head pod; at most one can exist per epoch."""
    return f"{job}-head-{epoch}"


def worker_pod(job: str, uid: str, *, group: str, index: int, attempt: int) -> str:
    """Name of the pod that fills a slot. Two creations of one attempt collide, and one wins."""
    return f"{job}-{group}-{index}-{_short(f'{uid}/{group}/{index}/{attempt}', 5)}"


def canary_pod(job: str, uid: str, template: str) -> str:
    return f"{job}-canary-{_short(f'{uid}/{template}', 8)}"


def config_map(job: str, config: str) -> str:
    return f"{job}-config-{config}"


def head_service(job: str) -> str:
    return f"{job}-head"


def workload(job: str, uid: str) -> str:
    """Name of a job's Workload, in the format of Kueue's own integrations."""
    return f"collectorjob-{job}-{_short(uid, 5)}"


def digest(*parts: Any) -> str:
    """Digest of plain JSON data, eight characters."""
    return _short(json.dumps(parts, sort_keys=True, separators=(",", ":")), 8)


def child_labels(job: str, uid: str, *, role: str = "") -> dict[str, str]:
    labels = {
        "app.kubernetes.io/name": "cormorant",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/part-of": "cormorant",
        MANAGED_BY: MANAGER,
        JOB: job,
        JOB_UID: uid,
    }
    return labels | ({"app.kubernetes.io/component": role, ROLE: role} if role else {})


OWN_LABELS = child_labels("", "").keys()
"""Labels that the operator sets on every object."""


def _short(text: str, length: int) -> str:
    # Lower-case base 32: every character is valid anywhere in a name.
    raw = hashlib.sha256(text.encode()).digest()
    return base64.b32encode(raw).decode().lower()[:length]
