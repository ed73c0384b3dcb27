"""What `reconcile` wants done: a list of small orders, the status to write, and when to look again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from cormorant_contract.status import CollectorJobStatus
from cormorant_operator.names import Manifest
from cormorant_operator.observed import Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTemplate:
    """Ask the API server what it thinks of a pod, by a dry run."""

    template: str
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyChild:
    """Bring a Service or a ConfigMap about, by server-side apply."""

    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTokens:
    """Bring the Secret of tokens about."""

    claim: Manifest | None = None
    """Nothing of the job exists yet, so a Secret of this name is not the job's. This ConfigMap is applied once the name
    is free: from then on the Secret is the job's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    """Create a pod; that it exists already, as the job's own, is success."""

    owner: str
    """Whose refusals it shares: a group's name, or "head"."""
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete this very pod, with its grace."""

    pod: Pod
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkPod:
    """Write an annotation with a time: a fact that must outlive the operator."""

    pod: Pod
    annotation: str
    at: datetime | None
    """None: take the annotation away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteChild:
    """Delete a ConfigMap that nobody reads any more, or a PodDisruptionBudget that nobody asks for."""

    kind: Literal["ConfigMap", "PodDisruptionBudget"]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDesired:
    pod: Pod
    sizes: Mapping[str, int]
    empty_slots: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainHead:
    pod: Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckNode:
    """Look at a node: whether the pods that are deleted on it will be confirmed gone."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    """Delete the job itself: its time is over."""


Action: TypeAlias = (
    CheckTemplate
    | ApplyChild
    | CreateTokens
    | CreatePod
    | DeletePod
    | MarkPod
    | DeleteChild
    | SetDesired
    | DrainHead
    | CheckNode
    | DeleteJob
)


def owner_of(action: Action) -> str:
    """The key under which a refusal of this action is kept; empty for words to the head and for looks at nodes.

    After a refusal, actions of the same owner wait.
    """
    match action:
        case CreatePod():
            return action.owner
        case CheckTemplate():
            return "Pod"
        case ApplyChild():
            return str(action.manifest["kind"])
        case CreateTokens():
            return "Secret"
        case DeletePod() | MarkPod():
            return f"{POD_OWNER}{action.pod.name}"
        case DeleteChild():
            return f"{action.kind}/{action.name}"
        case DeleteJob():
            return "CollectorJob"
        case SetDesired() | DrainHead() | CheckNode():
            return ""


POD_OWNER = "pod/"
"""Prefix of the owners that are one existing pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """An event to tell people of, once."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decision of one reconcile."""

    actions: tuple[Action, ...] = ()
    """In the order in which they are to be done."""
    status: CollectorJobStatus | None = None
    """To be written after the actions; None: it is right as it is."""
    is_counters_only: bool = False
    """Nothing but counters is new in the status: its write may wait, and is not worth a retry."""
    counters_at: datetime | None = None
    """When counters that moved are to be written, after one more question to the head; None: none wait."""
    events: tuple[JobEvent, ...] = ()
    due: datetime | None = None
    """When time alone changes the decision; None: never."""
    poll_s: float | None = None
    """How old the head's answer may get; None: nobody is to be asked."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do and nothing to write."""
        return not self.actions and self.status is None
