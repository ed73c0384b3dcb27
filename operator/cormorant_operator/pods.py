"""Pods and nodes, reduced to the facts that `reconcile` reads; slots, and when the next pod may fill one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, Literal, get_args

from cormorant_contract.children import ATTEMPT, EPOCH, GROUP, HEAD, INDEX, RESTARTS, ROLE
from cormorant_operator import names

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
Role = Literal["head", "worker", "canary"]

EXIT_REFUSED, EXIT_BLOCKED, EXIT_STARVED = 2, 3, 4
"""Exit codes of a head: invalid configuration; an environment that must be repaired first (disk, device); no CPU
time.
"""


class Obstacle(Enum):
    """Why a pod does not start."""

    NONE = ""
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL = "ImagePull"
    CONTAINER_CONFIG = "ContainerConfig"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod of the job.

    Pending -> Running (not ready <-> ready) -> Succeeded | Failed; terminating from the moment it is deleted.
    """

    name: str
    uid: str
    role: Role
    created: datetime
    group: str = ""
    index: int = 0
    attempt: int = 0
    """Number of pods that filled the slot before."""
    epoch: int = 0
    """Epoch of a head; 0 for other pods."""
    template: str = ""
    """Digest of the template it was created from."""
    base_image: str = ""
    cuda_image: str = ""
    """Image of the workers with a device, from the head's pod; empty: base_image."""
    image: str = ""
    """Image of our container."""
    failures: int = 0
    """Consecutive failures before this pod."""
    restarts: int = 0
    """All failures of the slot before this pod."""
    phase: PodPhase = "Pending"
    is_scheduled: bool = False
    scheduled_since: datetime | None = None
    ready_since: datetime | None = None
    unready_since: datetime | None = None
    deletion_deadline: datetime | None = None
    """End of its grace period; set once the pod is deleted."""
    has_sidecar: bool = False
    """Our container ended, but another one is still running."""
    is_rejected: bool = False
    """The kubelet rejected it; none of its containers ran."""
    node: str = ""
    is_taint_evicted: bool = False
    """Deleted because of a taint: its node is lost, or healthy but reserved."""
    is_disrupted: bool = False
    """Evicted, preempted, rejected by the kubelet, or its node was drained or lost: not its own failure."""
    obstacle: Obstacle = Obstacle.NONE
    obstacle_message: str = ""
    reason: str = ""
    """Why it ended, according to Kubernetes."""
    exit_code: int | None = None
    message: str = ""
    """Why it ended, from its termination message."""
    settled_frames: int | None = None
    """Settled frames from a head's termination message; None if it has none."""
    ended: datetime | None = None
    ran_s: float = 0.0
    """Run time of our container in seconds, once it ended."""
    retiring_since: datetime | None = None
    draining_since: datetime | None = None
    stalled_since: datetime | None = None
    ip: str = ""
    is_tls: bool = False
    """A head that serves only HTTPS."""

    @property
    def is_terminating(self) -> bool:
        return self.deletion_deadline is not None

    @property
    def is_terminal(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_live(self) -> bool:
        """Whether it fills its slot: neither deleted, nor ended, nor on a lost node."""
        return not self.is_terminating and not self.is_terminal and self.phase != "Unknown"

    @property
    def is_ready(self) -> bool:
        return self.is_live and self.ready_since is not None

    @property
    def is_blocked(self) -> bool:
        """Whether it lacked a disk, a device or CPU time, which does not count as a failure."""
        codes = (EXIT_BLOCKED, EXIT_STARVED) if self.role == "head" else (EXIT_BLOCKED,)
        return self.role != "canary" and self.is_terminal and self.exit_code in codes

    @property
    def must_wait(self) -> bool:
        """Whether its successor starts after a backoff."""
        return self.is_failure or ((self.is_rejected or self.is_blocked) and not self.is_terminating)

    @property
    def starting_since(self) -> datetime | None:
        """Since when it could have become ready; None if it is not scheduled."""
        moments = (self.scheduled_since or self.created, self.unready_since)
        return max(moment for moment in moments if moment is not None) if self.is_scheduled else None

    @property
    def is_asked(self) -> bool:
        """Whether a head can be polled: it is ready, or it is draining."""
        return bool(self.ip) and (self.is_ready or (self.is_live and self.draining_since is not None))

    @property
    def is_failure(self) -> bool:
        """Whether its end counts as a failure: not a disruption, and not requested by the operator."""
        if self.stalled_since is not None:
            return True
        is_done = self.role == "head" and self.phase == "Succeeded"
        if self.is_blocked or is_done:
            return False
        return self.is_terminal and not (self.is_terminating or self.is_disrupted or self.draining_since is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    is_lost: bool
    """The node is gone or not ready, or has the out-of-service taint."""
    at: datetime


# -- slots -----------------------------------------------------------------------------------------------------

RESET_AFTER_S = 600.0
"""A pod that ran this long was healthy: its failure counts as the first."""
_BASE_S = 10.0
_MAX_S = 360.0
_BLOCKED_S, _STARVED_S = 120.0, 10.0
"""Delays after a pod that lacked a disk or a device, and after one that lacked CPU time. Not counted as failures."""
_REJECTED_S = 30.0
"""Delay after a kubelet rejected a pod. Rejections are not counted, so the delay does not grow."""


def failures_after(pod: Pod) -> int:
    if not pod.is_failure:
        return pod.failures
    is_first = pod.ran_s >= RESET_AFTER_S and pod.stalled_since is None
    return 1 if is_first else pod.failures + 1


def next_attempt_at(pod: Pod) -> datetime:
    """When the slot of a failed pod may be refilled."""
    if pod.is_blocked:
        wait_s = _STARVED_S if pod.exit_code == EXIT_STARVED else _BLOCKED_S
        return (pod.ended or pod.created) + timedelta(seconds=wait_s)
    if pod.is_rejected:
        return pod.created + timedelta(seconds=_REJECTED_S)
    # None after the first failure, then 10, 20, 40 ... 360 s. The exponent is bounded: 2.0 ** 5000 overflows.
    failures = failures_after(pod)
    wait_s = min(_MAX_S, _BASE_S * 2.0 ** min(failures - 2, 16)) if failures > 1 else 0.0
    return (pod.ended or pod.created) + timedelta(seconds=wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place (group, index) of a worker, and its existing pods, the newest attempt last.

        empty -> filled by attempt 0 -> its pod ends, is deleted or lost -> empty -> filled by attempt 1 ...

    A slot has at most one live pod. The last failed pod is kept until its successor has been ready for a while, as the
    record of the failure and its backoff, which is computed from that pod alone, so that it survives a restart of the
    operator.
    """

    index: int
    pods: tuple[Pod, ...] = ()
    last_attempt: int = -1
    """Highest attempt ever seen, including deleted pods; -1: none.

    Names are not reused: one of two operators may see a pod's end and refill the slot before the other notices. Both
    then create the same successor, and the API server accepts one of them."""

    @property
    def newest(self) -> Pod | None:
        """The pod with the highest attempt, live or not."""
        return self.pods[-1] if self.pods else None

    @property
    def live(self) -> Pod | None:
        return next((pod for pod in reversed(self.pods) if pod.is_live), None)

    @property
    def restarts(self) -> int:
        return max((pod.restarts + pod.is_failure for pod in self.pods), default=0)

    def failures(self, template: str) -> int:
        """Consecutive failures. Those of another template do not count: the user has changed it since."""
        newest = self.newest
        return failures_after(newest) if newest is not None and newest.template == template else 0

    def waits_until(self, template: str) -> datetime | None:
        """When the next attempt may start after a failure of this template; None: it need not wait."""
        newest = self.newest
        return next_attempt_at(newest) if newest and newest.template == template and newest.must_wait else None

    def leftovers(self, now: datetime) -> tuple[list[Pod], datetime | None]:
        """Ended pods that can be deleted, and when the next one can."""
        ended = [pod for pod in self.pods if pod.is_terminal and not pod.is_terminating]
        record = [pod for pod in ended if pod.is_failure][-1:]
        over = [pod for pod in ended if pod is not self.newest and pod not in record]
        live = self.live
        if not record or record[0] is self.newest or live is None:
            return over, None
        until = live.ready_since + timedelta(seconds=RESET_AFTER_S) if live.ready_since is not None else None
        # A pod with a running sidecar occupies its node; its failure count is in the annotations of its successor.
        if record[0].has_sidecar or (until is not None and now >= until):
            return over + record, None
        return over, until


# -- reading pods and nodes --------------------------------------------------------------------------------------

_UNPLACED = ("Unschedulable", "SchedulingGated", "SchedulerError")
_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError")
_REJECTIONS = ("UnexpectedAdmissionError", "NodeAffinity", "TopologyAffinityError", "NodeShutdown", "Terminated")
_EXPELLED = "DeletionByTaintManager"
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_MAX_MESSAGE, _MAX_DIGITS = 1024, 9
_NO_COUNT = (
    "it left no frame count, as every head does; remove command, args and terminationMessagePath of container head "
    "from head.template"
)


def read_pod(raw: Mapping[str, Any]) -> Pod | None:
    """The facts of a pod; None if it lacks the operator's labels."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    role = _role(labels.get(ROLE))
    if role is None:
        return None
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    ended = _ended(role, status)
    is_rejected = _never_ran(role, status)
    # Parse before truncating: the count is at the start, and the end is what people read.
    frames, message = read_termination_message(ended.get("message") or status.get("message") or "")
    # The kubelet itself ends native sidecars (init containers).
    others = [state for name, state in _states(status).items() if name != role]
    began, over = _moment(ended.get("startedAt")), _moment(ended.get("finishedAt"))
    disruption = conditions.get("DisruptionTarget", {})
    obstacle, words = _obstacle(status, conditions)
    phase: Any = status.get("phase") or "Pending"
    if ended:
        # The pod's phase changes only when every container has ended, and a mesh sidecar never ends by itself.
        phase = "Failed" if ended.get("exitCode") else "Succeeded"
    if role == HEAD and phase == "Succeeded" and frames is None:
        # Every head leaves a count: another command ran, and its end says nothing about the job.
        phase, message = "Failed", _NO_COUNT
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
        phase=phase if phase in get_args(PodPhase) else "Unknown",
        node=(raw.get("spec") or {}).get("nodeName") or "",
        is_taint_evicted="deletionTimestamp" in metadata and disruption.get("reason") == _EXPELLED,
        has_sidecar=bool(ended) and any("running" in state for state in others),
        is_scheduled=conditions.get("PodScheduled", {}).get("status") == "True",
        scheduled_since=_since(conditions.get("PodScheduled", {})),
        ready_since=_since(conditions.get("Ready", {})),
        unready_since=_since(conditions.get("Ready", {}), "False"),
        # Kubernetes sets deletionTimestamp to the end of the grace period.
        deletion_deadline=_moment(metadata.get("deletionTimestamp")),
        is_disrupted=disruption.get("status") == "True" or is_rejected,
        is_rejected=is_rejected,
        obstacle=obstacle,
        obstacle_message=words[:_MAX_MESSAGE],
        reason=ended.get("reason") or status.get("reason") or "",
        exit_code=ended.get("exitCode"),
        settled_frames=frames,
        message=message[-_MAX_MESSAGE:],
        ended=over,
        ran_s=max(0.0, (over - began).total_seconds()) if began is not None and over is not None else 0.0,
        retiring_since=_moment(annotations.get(names.RETIRING)),
        draining_since=_moment(annotations.get(names.DRAINING)),
        stalled_since=_moment(annotations.get(names.STALLED)),
        ip=status.get("podIP") or "",
        # From its command line: the manifest may have changed since.
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


def read_node(raw: Mapping[str, Any], *, at: datetime) -> NodeFact:
    """Whether a node is lost, so that the deletion of its pods will not be confirmed."""
    conditions = {item["type"]: item for item in (raw.get("status") or {}).get("conditions") or ()}
    taints = {taint.get("key") for taint in (raw.get("spec") or {}).get("taints") or ()}
    is_ready = conditions.get("Ready", {}).get("status") == "True"
    return NodeFact(is_lost=not is_ready or _OUT_OF_SERVICE in taints, at=at)


def _obstacle(status: Mapping[str, Any], conditions: Mapping[str, Any]) -> tuple[Obstacle, str]:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") in _UNPLACED:
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


def _never_ran(role: str, status: Mapping[str, Any]) -> bool:
    """Whether the kubelet rejected the pod (OutOfcpu, UnexpectedAdmissionError, NodeAffinity ...) before it ran."""
    reason = status.get("reason") or ""
    if status.get("phase") != "Failed" or not reason:
        return False
    if reason.startswith("OutOf") or reason in _REJECTIONS:
        return True  # even if the pod ran before its node was restarted
    began = any("waiting" not in (item.get("state") or {"waiting": {}}) for item in _statuses(status))
    return not began and not _ended(role, status)


def _statuses(status: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))


def _since(condition: Mapping[str, Any], status: str = "True") -> datetime | None:
    return _moment(condition.get("lastTransitionTime")) if condition.get("status") == status else None


def _count(text: str | None) -> int:
    # Python refuses to parse an annotation of thousands of digits.
    return int(text) if text is not None and text.isdecimal() and len(text) <= _MAX_DIGITS else 0


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


def read_termination_message(message: str) -> tuple[int | None, str]:
    """Settled frames, and why a container ended.

    A head writes `{"frames": 1000, "reason": "..."}`. Other messages are the last lines of a log, and have no frames.
    """
    try:
        document = json.loads(message)
    except (ValueError, RecursionError):  # RecursionError: many nested brackets
        document = None
    if not isinstance(document, dict) or "frames" not in document:
        return None, message.strip()
    frames = document["frames"]
    is_count = isinstance(frames, int) and not isinstance(frames, bool) and frames >= 0
    return frames if is_count else None, str(document.get("reason", ""))
