"""`status`: what the operator reports. Conditions are the truth; the phase is for people."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import COUNT_MAX, REASON_PATTERN, Contract, Count32, Count64, Text, Time, Whole, keyed_by
from cormorant_contract.workers import GroupName

Phase = Literal[
    "Pending",
    "Starting",
    "Running",
    "Degraded",
    "Paused",
    "Suspending",
    "Suspended",
    "Restarting",
    "Completing",
    "Completed",
    "Failed",
]
ConditionType = Literal[
    "Accepted",
    "Scheduled",
    "Ready",
    "Updating",
    "Progressing",
    "Stalled",
    "Paused",
    "Suspended",
    "Completed",
    "Failed",
]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FramesStatus(Contract):
    """Progress of the job."""

    collected: Count64 = 0
    """Frames accepted by the output over all heads of the job. Frames lost with a head are subtracted."""

    settled: Count64 = 0
    """Frames that no later head collects again: acknowledged by a learner, dropped by drop_oldest, or stored in a
    dataset."""

    target: Count64 | None = None
    """spec.collection.totalFrames, if set."""

    per_second: Rate = 0.0
    """Frames per second over the last minute."""

    last_progress_time: Time | None = None
    """When the last frame was counted."""


class WeightsStatus(Contract):
    """Policy versions of the fleet."""

    version: Count64 = 0
    """Newest published policy version; 0 before the first publish."""

    min_applied_version: Count64 = 0
    """Oldest policy version that any worker uses."""

    updated_time: Time | None = None
    """When the newest version was published."""


class GroupStatus(Contract):
    """Workers of one group."""

    name: GroupName
    """Name of the group."""

    desired: Count32 = 0
    """Workers requested by the spec."""

    ready: Count32 = 0
    """Workers that are ready."""

    restarts: Count32 = 0
    """Workers that were replaced after a failure."""


class ElasticStatus(Contract):
    """Values for the scale subresource."""

    replicas: Count32 = 0
    """Worker pods of the elastic group."""

    selector: Text = ""
    """Label selector of these pods, for autoscalers."""


class Condition(Contract):
    """One condition, in the shape of Kubernetes' own."""

    type: ConditionType
    """Type of the condition."""

    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""

    observed_generation: Annotated[Whole, Field(ge=0, le=COUNT_MAX)] = 0
    """Generation of the spec that the condition reflects."""

    last_transition_time: Time
    """When the status changed last."""

    reason: Annotated[str, Field(strict=True, min_length=1, max_length=1024, pattern=REASON_PATTERN)]
    """Why, as one CamelCase word for machines."""

    message: Annotated[str, Field(strict=True, max_length=32768)] = ""
    """Why, as a sentence for people."""


class Failure(Contract):
    """A pod that failed."""

    pod: Annotated[str, Field(strict=True, max_length=253)]
    """Name of the pod."""

    reason: Text
    """Kubernetes' reason, for example OOMKilled."""

    exit_code: Annotated[Whole, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    """Exit code of the container, if it ran."""

    time: Time
    """When it ended."""

    message: Annotated[str, Field(strict=True, max_length=1024)] = ""
    """The termination message of its container, or the kubelet's message."""


class CollectorJobStatus(Contract):
    """Observed state of the job, written by the operator only."""

    observed_generation: Count64 = 0
    """Generation of the spec that this status reflects."""

    phase: Phase = "Pending"
    """Summary of the conditions, for people."""

    reason: Annotated[str, Field(strict=True, max_length=1024)] = ""
    """Reason of the condition that keeps the job from collecting. Empty if nothing does."""

    epoch: Count32 = 0
    """Incarnation of the head, counted from 1; 0 before the first."""

    head_restarts: Count32 = 0
    """Heads that were replaced after a failure; counted against runPolicy.maxHeadRestarts."""

    start_time: Time | None = None
    """When the job was first accepted or last resumed."""

    completion_time: Time | None = None
    """When the job completed or failed."""

    workers: Annotated[str, Field(strict=True, max_length=32)] = ""
    """Ready and desired workers over all groups, for people, for example 17/18."""

    frames: FramesStatus = FramesStatus()
    weights: WeightsStatus = WeightsStatus()
    groups: Annotated[tuple[GroupStatus, ...], Field(max_length=8, json_schema_extra=keyed_by("name"))] = ()
    """Workers by group."""

    elastic: ElasticStatus = ElasticStatus()
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=keyed_by("type"))] = ()
    """Conditions of the job. Completed and Failed never revert to False."""

    recent_failures: Annotated[tuple[Failure, ...], Field(max_length=10)] = ()
    """The last pods that failed, newest last."""
