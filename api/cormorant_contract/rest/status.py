"""`/v1/status` and `/v1/workers`: what goes on."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.rest.base import Answer, Count, Time, Version
from cormorant_contract.rest.control import DesiredReport
from cormorant_contract.rest.pauses import PauseLease, PauseState

Phase = Literal["Starting", "Running", "Paused", "Draining", "Completing", "Completed", "Failed"]


class Condition(Answer):
    """One fact, in the shape of Kubernetes' conditions."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""


class FrameCounts(Answer):
    """Progress of the job."""

    collected: Count
    """Accepted by the output: what totalFrames counts."""
    settled: Count = 0
    """Those that no later head collects again: acknowledged, dropped as the oldest, or in a dataset. 0 where an older
    head does not say."""
    target: Count | None
    per_second: float
    """Stepped in the last seconds, per second."""
    stepped: Count
    delivered: Count
    """In batches that consumers acknowledged."""
    dropped: dict[str, Count]
    """Stepped and never delivered, by reason."""


class WeightsReport(Answer):
    """Policy versions of the fleet."""

    version: Version
    min_applied_version: Version
    """Oldest version that a worker acts with; equal to `version` when there is no worker."""
    update_id: str = ""
    """Of the newest publish."""
    update_state: str = ""


class QueueReport(Answer):
    """Batches between the workers and consumers."""

    capacity: Count
    waiting: Count
    """Complete and not asked for yet."""
    ready: Count
    """Given back by a consumer, or not taken by the one that asked."""
    lent: Count
    """With consumers, not acknowledged."""
    oldest_lent_seconds: Annotated[float, Field(ge=0)] | None = None
    """Since the oldest of those was handed out."""
    acked: Count
    redelivered: Count
    held: Count = 0
    """Acknowledged by one consumer while another still reads their shared memory; no worker may write there."""
    ended: bool
    """All is delivered and acknowledged."""


class Consumer(Answer):
    """One that takes batches."""

    name: str
    taken: Count
    acked: Count
    lent: Count
    last_seen_at: Time


class Worker(Answer):
    """One worker."""

    id: str
    """`<group>-<index>`."""
    group: str
    ready: bool
    phase: str
    attempt: Count
    version: int
    """The policy version that acts."""
    lag: Count
    """Published versions that it is behind."""
    frames: Count
    """Stepped by this attempt."""
    per_second: float
    env_restarts: Count
    pid: Count


class Workers(Answer):
    """Every worker that exists."""

    workers: tuple[Worker, ...]


class GroupReport(Answer):
    """Workers of one group."""

    name: str
    desired: Count
    ready: Count


class EpisodeReport(Answer):
    """Episodes that ended."""

    count: Count
    mean_return: float | None
    """Of the last ones, 100 at most."""
    mean_length: float | None


class Status(Answer):
    """The whole job at one moment."""

    job: str
    namespace: str
    epoch: str
    """Differs between two runs of a head: batches of another epoch are unknown."""
    phase: Phase
    conditions: tuple[Condition, ...]
    frames: FrameCounts
    episodes: EpisodeReport
    weights: WeightsReport
    groups: tuple[GroupReport, ...]
    restarts: Count
    pause_state: PauseState
    pauses: tuple[PauseLease, ...]
    queue: QueueReport
    consumers: tuple[Consumer, ...]
    data_port: Count
    """Bulk bytes (batches, weights, state) are best asked for there; 0: this port serves all."""
    listeners: Count
    """Streams of events that are open."""
    listeners_dropped: Count
    """Streams that were closed because they read too slowly."""
    started_at: Time
    desired: DesiredReport | None = None
    """As `GET /v1/desired`: one request tells the operator everything. None: an older head does not say."""


class Build(Answer):
    """What runs."""

    version: str
    api: Literal["v1"] = "v1"


class Check(Answer):
    """One condition of readiness."""

    name: str
    ok: bool
    detail: str = ""


class Readiness(Answer):
    """Whether requests should be sent here."""

    ready: bool
    checks: tuple[Check, ...]
