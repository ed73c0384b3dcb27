"""Reduces pods and nodes from the API server to the facts that `reconcile` reads."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, get_args

from cormorant_contract.children import ATTEMPT, EPOCH, GROUP, INDEX, RESTARTS, ROLE
from cormorant_operator import names
from cormorant_operator.observed import NodeFact, Obstacle, Pod, PodPhase, Role

_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError")
_REJECTIONS = ("UnexpectedAdmissionError", "NodeAffinity", "TopologyAffinityError", "NodeShutdown", "Terminated")
_EXPELLED = "DeletionByTaintManager"
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_MAX_MESSAGE = 1024


def read_pod(raw: Mapping[str, Any]) -> Pod | None:
    """The facts of a pod; None if it lacks the operator's labels."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    role = _role(labels.get(ROLE))
    if role is None:
        return None
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    ended = _ended(role, status)
    words_left = ended.get("message") or status.get("message") or ""
    disruption = conditions.get("DisruptionTarget", {})
    obstacle, words = _obstacle(status, conditions)
    containers = (raw.get("spec") or {}).get("containers") or ()
    container: Mapping[str, Any] = next((item for item in containers if item.get("name") == role), {})
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=role,
        created=datetime.fromisoformat(metadata["creationTimestamp"]),
        group=labels.get(GROUP, ""),
        index=_count(labels.get(INDEX)),
        attempt=_count(labels.get(ATTEMPT)),
        epoch=_count(labels.get(EPOCH)),
        template=labels.get(names.TEMPLATE, ""),
        image=str(container.get("image") or ""),
        base_image=annotations.get(names.BASE_IMAGE, ""),
        cuda_image=annotations.get(names.CUDA_IMAGE, ""),
        failures=_count(annotations.get(names.FAILURES)),
        restarts=_count(annotations.get(RESTARTS)),
        phase=_phase(raw, ended),
        node=(raw.get("spec") or {}).get("nodeName") or "",
        is_taint_evicted="deletionTimestamp" in metadata and disruption.get("reason") == _EXPELLED,
        has_sidecar=bool(ended) and _has_sidecar(role, status),
        is_scheduled=conditions.get("PodScheduled", {}).get("status") == "True",
        scheduled_since=_since(conditions.get("PodScheduled", {})),
        ready_since=_since(conditions.get("Ready", {})),
        unready_since=_since(conditions.get("Ready", {}), "False"),
        # Kubernetes sets deletionTimestamp to the end of the grace period.
        deletion_deadline=_moment(metadata.get("deletionTimestamp")),
        is_disrupted=disruption.get("status") == "True" or _never_ran(role, status),
        is_rejected=_never_ran(role, status),
        obstacle=obstacle,
        obstacle_message=words[:_MAX_MESSAGE],
        reason=ended.get("reason") or status.get("reason") or "",
        exit_code=ended.get("exitCode"),
        # Parse before truncating: the count is at the start, and the end is what people read.
        settled_frames=settled_frames(words_left),
        message=termination_reason(words_left)[-_MAX_MESSAGE:],
        ended=_moment(ended.get("finishedAt")),
        ran_s=_ran_s(ended),
        retiring_since=_moment(annotations.get(names.RETIRING)),
        draining_since=_moment(annotations.get(names.DRAINING)),
        stalled_since=_moment(annotations.get(names.STALLED)),
        ip=status.get("podIP") or "",
        # By what it was started with: the manifest may say otherwise by now.
        is_tls=role == "head" and names.TLS_OPTION in (container.get("command") or ()),
    )


def pod_identity(raw: Mapping[str, Any]) -> tuple[Role | None, tuple[str, int], int]:
    """Role, slot (group, index), and epoch or attempt of a pod object or manifest."""
    labels = raw["metadata"].get("labels") or {}
    role = _role(labels.get(ROLE))
    number = labels.get(EPOCH if role == "head" else ATTEMPT)
    return role, (labels.get(GROUP, ""), _count(labels.get(INDEX))), _count(number)


def controller_uid(raw: Mapping[str, Any]) -> str:
    """Uid of the controlling owner; empty if there is none."""
    references = raw["metadata"].get("ownerReferences") or ()
    return next((str(reference["uid"]) for reference in references if reference.get("controller")), "")


def _role(text: str | None) -> Role | None:
    return text if text in ("head", "worker", "canary") else None  # type: ignore[return-value]  # it is one of them


def _phase(raw: Mapping[str, Any], ended: Mapping[str, Any]) -> PodPhase:
    if ended:
        # The pod's phase waits for every container, and a sidecar of a mesh never ends by itself.
        return "Failed" if ended.get("exitCode") else "Succeeded"
    phase = (raw.get("status") or {}).get("phase") or "Pending"
    return phase if phase in get_args(PodPhase) else "Unknown"  # type: ignore[return-value]  # it is one of them


def read_node(raw: Mapping[str, Any], *, at: datetime) -> NodeFact:
    """Whether a node is lost, so that the deletion of its pods will not be confirmed."""
    conditions = {item["type"]: item for item in (raw.get("status") or {}).get("conditions") or ()}
    taints = {taint.get("key") for taint in (raw.get("spec") or {}).get("taints") or ()}
    is_ready = conditions.get("Ready", {}).get("status") == "True"
    return NodeFact(is_lost=not is_ready or _OUT_OF_SERVICE in taints, at=at)


def _obstacle(status: Mapping[str, Any], conditions: Mapping[str, Any]) -> tuple[Obstacle, str]:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") in ("Unschedulable", "SchedulingGated"):
        return Obstacle.UNSCHEDULABLE, scheduled.get("message") or "no node fits"
    for container in _statuses(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        words = waiting.get("message") or waiting.get("reason") or ""
        if waiting.get("reason") in _PULL_REASONS:
            return Obstacle.IMAGE_PULL, f"image {container.get('image')}: {words}"
        if waiting.get("reason") in _CONFIG_REASONS:
            return Obstacle.CONTAINER_CONFIG, words
    return Obstacle.NONE, ""


def _states(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {item["name"]: (item.get("state") or {}) for item in status.get("containerStatuses") or ()}


def _ended(role: str, status: Mapping[str, Any]) -> Mapping[str, Any]:
    """How our own container ended; a template may add others."""
    return _states(status).get(role, {}).get("terminated") or {}


def _has_sidecar(role: str, status: Mapping[str, Any]) -> bool:
    """Whether another container is still running. The kubelet itself ends native sidecars (init containers)."""
    return any("running" in state for name, state in _states(status).items() if name != role)


def _never_ran(role: str, status: Mapping[str, Any]) -> bool:
    """Whether the kubelet rejected the pod (OutOfcpu, UnexpectedAdmissionError, NodeAffinity ...) before it ran."""
    reason = status.get("reason") or ""
    if status.get("phase") != "Failed" or not reason:
        return False
    if reason.startswith("OutOf") or reason in _REJECTIONS:
        return True  # also if the pod ran before its node was restarted
    began = any("waiting" not in (item.get("state") or {"waiting": {}}) for item in _statuses(status))
    return not began and not _ended(role, status)


def _statuses(status: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))


def _ran_s(ended: Mapping[str, Any]) -> float:
    began, over = _moment(ended.get("startedAt")), _moment(ended.get("finishedAt"))
    return max(0.0, (over - began).total_seconds()) if began is not None and over is not None else 0.0


def _since(condition: Mapping[str, Any], status: str = "True") -> datetime | None:
    return _moment(condition.get("lastTransitionTime")) if condition.get("status") == status else None


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _moment(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    # A hand-written annotation without a time zone cannot be compared.
    return moment if moment.tzinfo is not None else None


def write_time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def settled_frames(message: str) -> int | None:
    """Settled frames in a head's termination message, `{"frames": 1000}`; None if it has none."""
    frames = _document(message).get("frames")
    return frames if isinstance(frames, int) and not isinstance(frames, bool) and frames >= 0 else None


def termination_reason(message: str) -> str:
    """Why a container ended: `reason` in the head's JSON termination message, or the last lines of its log."""
    document = _document(message)
    return str(document.get("reason", "")) if "frames" in document else message.strip()


def _document(message: str) -> dict[str, Any]:
    try:
        document = json.loads(message)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
