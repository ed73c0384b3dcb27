"""`/v1/status`, `/v1/workers`, and `/v1/evaluation`: the result table of a job with `collection.episodes`."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from cormorant_contract.rest.base import Answer, Count, Time, Version
from cormorant_contract.rest.control import DesiredReport, PauseLease, PauseState

Phase = Literal["Starting", "Running", "Paused", "Draining", "Completing", "Completed", "Failed"]


class Condition(Answer):
    """A condition, in the form that Kubernetes uses."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""


class FrameCounts(Answer):
    """Progress in frames."""

    collected: Count
    """Frames accepted by the output; `totalFrames` counts these."""
    settled: Count = 0
    """Frames that a later head will not collect again: acknowledged, dropped as the oldest, or in a dataset."""
    target: Count | None
    per_second: float
    """Frames stepped per second, over the last 10 s."""
    stepped: Count
    delivered: Count
    """Frames in acknowledged batches."""
    dropped: dict[str, Count]
    """Frames stepped but never delivered, by reason."""


class WeightsReport(Answer):
    """Published and applied policy versions."""

    version: Version
    min_applied_version: Version
    """Oldest version that any worker uses; `version` if there is no worker."""
    update_state: str = ""
    """State of the newest publish."""


class QueueReport(Answer):
    """Batches between workers and consumers."""

    capacity: Count
    waiting: Count
    """Complete, not requested by a consumer yet."""
    ready: Count
    """Ready for the next request: released by a consumer, or not picked up by the one that asked."""
    lent: Count
    """Delivered to consumers, not acknowledged yet."""
    oldest_lent_seconds: Annotated[float, Field(ge=0)] | None = None
    """Seconds since the oldest of these was delivered."""
    acked: Count
    redelivered: Count
    consumer_wait_seconds: Annotated[float, Field(ge=0)] = 0
    """Seconds in which a consumer waited for a batch."""
    ended: bool
    """True once every batch is delivered and acknowledged."""

    @property
    def filled(self) -> int:
        """Occupied places of the queue. `waiting` also counts complete batches that wait for a place."""
        return min(self.waiting, self.capacity)


class Consumer(Answer):
    """A consumer of batches."""

    name: str
    taken: Count
    acked: Count
    lent: Count
    last_seen_at: Time


class Worker(Answer):
    """One worker of the fleet."""

    id: str
    """`<group>-<index>`."""
    group: str
    ready: bool
    phase: str
    attempt: Count
    version: int
    """Policy version that the worker uses."""
    lag: Count
    """Versions by which the worker lags behind the newest published one."""
    frames: Count
    """Frames stepped by this attempt."""
    per_second: float
    env_restarts: Count
    pid: Count
    device: str = "cpu"
    """Torch device of its policy, e.g. `cuda:1`."""


class Workers(Answer):
    """All workers of the fleet."""

    workers: tuple[Worker, ...]


class GroupReport(Answer):
    """Desired and ready workers of one group."""

    name: str
    desired: Count
    ready: Count
    idle_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds in which its workers had no batch to collect, summed over all of them."""
    worker_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds of all its workers."""


class InferenceReport(Answer):
    """Rates of a group's inference servers over the last 10 s."""

    rows_per_second: float
    """Environments served per second."""
    rows_per_act: float
    """Mean number of rows per policy call."""
    padding: float
    """Share of the rows that only filled a batch up to its shape."""
    wait_ms: float
    """Mean time that a worker's request waited for its policy call."""
    act_ms: float
    """Mean time of one call of the policy."""
    busy: float
    """Share of the servers' time spent in policy calls."""


class EpisodeReport(Answer):
    """Completed episodes."""

    count: Count
    mean_return: float | None
    """Mean over the last episodes (at most 100)."""
    mean_length: float | None
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """Mean of each of `collection.episodeMetrics` over the same episodes; null: none of them had a number."""
    tasks: dict[str, "TaskReport"] = Field(default_factory=dict)
    """The episodes of each of `env.variants` by name, once it has ended one; empty without variants."""


class TaskReport(Answer):
    """Completed episodes of one variant."""

    count: Count
    means: dict[str, float | None]
    """`return`, `length` and `collection.episodeMetrics`: means over its last episodes (at most 100); null: none of
    them had a number."""


class StatisticsReport(Answer):
    """Running statistics of one batch key, for `collection.normalize`."""

    frames: Count
    """Number of acknowledged frames in the statistics."""
    published_frames: Count
    """Number of frames in the statistics of the newest published version."""
    mean: tuple[float, float]
    """Lowest and highest mean over the values of the key."""
    std: tuple[float, float]
    """Lowest and highest standard deviation."""


class Status(Answer):
    """State of the whole job."""

    job: str
    namespace: str
    epoch: str
    """Id of this run of the head. Batch ids of another epoch are unknown to it."""
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
    """Port for batches, weights and state; 0: use the control port."""
    started_at: Time
    desired: DesiredReport
    """Values set by `PUT /v1/desired`."""
    statistics: dict[str, StatisticsReport] = Field(default_factory=dict)
    """Statistics by batch key, if the manifest normalizes; next/reward has those of the discounted return."""
    inference: dict[str, InferenceReport] = Field(default_factory=dict)
    """Inference servers by group; empty without servers."""
    counts: Literal["frames", "episodes"] = "frames"
    """Unit of `collected`, `settled` and `target` of `frames`: an evaluation counts episodes."""


class SpacesReport(Answer):
    """Spaces of one environment, as JSON: `cormorant_contract.spaces.space_from_json` reads them."""

    observation: dict[str, Any]
    action: dict[str, Any]


class Build(Answer):
    """Version of the head and its API."""

    version: str
    api: Literal["v1"] = "v1"


class Readiness(Answer):
    """Whether the head accepts requests."""

    ready: bool
    reason: str = ""
    """Why it does not."""


class EpisodeResult(Answer):
    """One episode that was played."""

    task: str
    seed: Count
    options: dict[str, JsonValue]
    """Given to the environment at its reset."""
    total: float = Field(alias="return")
    """The undiscounted return."""
    length: Count
    terminated: bool
    """False: it was truncated."""
    metrics: dict[str, float]
    returns: dict[str, float] = Field(default={})
    """Return of each group of agents."""
    checkpoint: str = ""
    """URI of the weights, or the URI of each group of agents as JSON; empty where the job has one policy."""


class CheckpointTable(Answer):
    """Results of one weights file of a sweep."""

    planned: Count
    summary: dict[str, JsonValue]
    tasks: dict[str, JsonValue]


class EvaluationTable(Answer):
    """The recorded episodes, in the order of the plan, and their summary."""

    planned: Count
    """Episodes of the evaluation; it is complete when as many are listed."""
    episodes: tuple[EpisodeResult, ...]
    summary: dict[str, JsonValue]
    """Means with 95 % intervals, spread, and the success rate with Wilson's interval."""
    tasks: dict[str, JsonValue]
    """The same by task, where there are several."""
    checkpoints: dict[str, CheckpointTable] = Field(default={})
    """The same by weights file or pairing, where there are several."""
