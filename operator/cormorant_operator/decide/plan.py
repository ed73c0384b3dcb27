"""The result of `reconcile`: actions, the status to write, and when to reconcile again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

from cormorant_contract.rest.control import Desired
from cormorant_contract.status import CollectorJobStatus
from cormorant_operator.job import Fact
from cormorant_operator.names import Manifest
from cormorant_operator.pods import Pod, write_time

QueueKind: TypeAlias = Literal["ResourceFlavor", "WorkloadPriorityClass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTemplate:
    """Verify a pod template by a dry run."""

    template: str
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyChild:
    """Create or correct an object by server-side apply."""

    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTokens:
    claim: Manifest | None = None
    """Set while nothing of the job exists, so a Secret of this name is another owner's. This ConfigMap is applied once
    the name is free; from then on the Secret is the job's own."""
    is_wrong: bool = False
    """The head has rejected the operator's token long enough that the Secret must have been changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    """Create a pod. If the job's own pod exists already, that is success."""

    owner: str
    """Key of its refusals: a group's name, "head" or "canary"."""
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete the object with this uid: a pod, with its grace period; an unused ConfigMap; an unwanted
    PodDisruptionBudget or PodGroup; the Workload of a job that needs no quota.
    """

    kind: str
    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Merge `body` into an object, unless it has another uid or resourceVersion than `body` names."""

    kind: Literal["Pod", "Workload"]
    name: str
    uid: str
    body: Mapping[str, Any]
    subresource: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDesired:
    pod: Pod
    desired: Desired


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainHead:
    pod: Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckNode:
    """Check whether a node is lost; the deletion of a lost node's pods is never confirmed."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadQueueObject:
    """Read an object of Kueue that is not watched."""

    kind: QueueKind
    name: str
    admission: str = ""
    """The admission that a flavor is read for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    """Delete the job itself, because its ttlSecondsAfterFinished elapsed."""


def delete_pod(pod: Pod, why: str) -> Delete:
    return Delete(kind="Pod", name=pod.name, uid=pod.uid, why=why)


def mark_pod(pod: Pod, annotation: str, at: datetime | None) -> Patch:
    """Write a time into an annotation, where it survives a restart of the operator; None: remove the annotation."""
    value = write_time(at) if at is not None else None
    body = {"metadata": {"uid": pod.uid, "annotations": {annotation: value}}}
    return Patch(kind="Pod", name=pod.name, uid=pod.uid, body=body)


Action: TypeAlias = (
    CheckTemplate
    | ApplyChild
    | CreateTokens
    | CreatePod
    | Delete
    | Patch
    | SetDesired
    | DrainHead
    | CheckNode
    | ReadQueueObject
    | DeleteJob
)


def refusal_of(action: Action) -> tuple[str, str]:
    """Key under which a refusal of this action is kept, and the beginning of its message. After a refusal, actions with
    the same key wait. Both are empty for commands to heads and node checks.
    """
    match action:
        case CheckTemplate():
            return "Pod", ""
        case CreatePod():
            return action.owner, ""  # the group's name is already in the message
        case ApplyChild():
            kind = str(action.manifest["kind"])
            return kind, f"{kind} {action.manifest['metadata']['name']}: "
        case CreateTokens():
            return "Secret", "token Secret: "
        case Delete():
            return f"{action.kind}/{action.name}", f"cannot delete {action.kind} {action.name}: "
        case Patch():
            return f"{action.kind}/{action.name}", f"cannot change {action.kind} {action.name}: "
        case ReadQueueObject():
            return action.kind, f"cannot read {action.kind} {action.name}: "
        case DeleteJob():
            return "CollectorJob", "cannot delete the job: "
        case SetDesired() | DrainHead() | CheckNode():
            return "", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """An Event to report once."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    actions: tuple[Action, ...] = ()
    """In order of execution."""
    status: CollectorJobStatus | None = None
    """Written after the actions; None: unchanged."""
    is_counters_only: bool = False
    """Only counters changed: the write may wait and is not retried."""
    counters_at: datetime | None = None
    """When changed counters are written, after another poll of the head; None: no counters wait."""
    events: tuple[JobEvent, ...] = ()
    due: datetime | None = None
    """When to reconcile again even if nothing changes; None: never."""
    poll_s: float | None = None
    """Maximum age of the head's answer; None: there is no head to poll."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """Decisions of a reconcile so far. The modules of `decide` fill it; the plan and the status are built from it."""

    epoch: int
    """The epoch of the live head, or of the head that this plan creates."""
    head_restarts: int
    actions: list[Action] = field(default_factory=list)
    dues: list[datetime] = field(default_factory=list)
    is_head_coming: bool = False
    """A head is live, is created now, or will be created after a backoff."""
    is_urgent: bool = False
    """A decision waits for the head's answer."""
    suspension: Literal["no", "draining", "deleting", "suspended"] = "no"
    updating: Literal["UpToDate", "ReplacingHead", "TryingImage", "RollingUpdate"] = "UpToDate"
    """Reason of the condition Updating."""
    is_stalled: bool = False
    outcome: Fact | None = None
    """Completed or Failed."""
