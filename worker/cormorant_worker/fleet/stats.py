"""A snapshot of a fleet's counters, and the state of published weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Literal, TypeVar

from cormorant_contract.fleet import Stats
from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker.normalize.moments import StatisticsGlance
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion

K = TypeVar("K")
RestartReason = Literal["crash", "hang", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReceipts:
    """State of a published version."""

    version: PolicyVersion
    applied: tuple[str, ...]
    """Workers that use this version or a newer one."""
    waiting: tuple[str, ...]
    """Workers that will apply this version at their next batch."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reasons of the workers that refused it, by worker name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker as the fleet sees it."""

    name: str
    """`<group>-<index>`."""
    attempt: int
    phase: str
    """importing, building, waiting, stepping, storing, paused."""
    frames: int
    """Frames that this attempt has stepped."""
    version: PolicyVersion
    pid: int
    """0 while it has none: a Ray actor that is not placed."""
    env_restarts: int
    device: str = "cpu"
    """Torch device of its policy."""


@dataclass(slots=True, kw_only=True)
class GroupStats:
    """One worker group, including workers that are gone. The fleet counts in one of its own and hands out copies."""

    desired: int = 0
    """Number of wanted slots."""
    alive: int = 0
    """Workers that start or run."""
    versions: Counter[PolicyVersion] = field(default_factory=Counter)
    """Workers that may collect, by the version that acts in them."""
    stepped_frames: int = 0
    """So far."""
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    """Seconds of all workers by activity."""
    restarts: Counter[RestartReason] = field(default_factory=Counter)
    """Workers replaced so far, by reason."""
    env_restarts: int = 0
    policy_call: str = ""
    """How its newest worker calls the policy, and the cost of finding out; empty with `compile: off`."""

    @property
    def ready(self) -> int:
        """Workers that may collect."""
        return self.versions.total()

    @property
    def starting(self) -> int:
        return self.alive - self.ready

    @property
    def min_version(self) -> PolicyVersion:
        """The oldest that acts in it."""
        return min(self.versions, default=INITIAL_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStats:
    """The whole fleet at one moment."""

    frames: int
    """Frames accepted by the output: what `totalFrames` counts."""
    settled_frames: int = 0
    """Frames that can no longer be lost: acknowledged by consumers, dropped as the oldest, or in a dataset."""
    stepped_frames: int = 0
    """Frames stepped so far, including those of unfinished batches: for rates."""
    total_frames: int | None = None
    episodes: int = 0
    """Episodes ended so far."""
    recent_returns: tuple[float, ...] = ()
    """Returns of the last episodes, 100 at most."""
    recent_lengths: tuple[int, ...] = ()
    recent_metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Episode metrics of the same episodes, by name. NaN for missing values."""
    recent_task_metrics: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """The same by name and variant, with return and length, of the last 100 episodes of each; empty without
    variants."""
    task_episodes: Mapping[str, int] = field(default_factory=dict)
    """Episodes by variant; empty without variants."""
    version: PolicyVersion = INITIAL_VERSION
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Frames that were stepped and never delivered, by reason: crash, stale, drop_oldest, drain, restore, seed."""
    restarts: int = 0
    """Workers replaced so far."""
    env_failures: str = ""
    """Message that environments keep failing, with the first failure and its traceback; empty if they do not."""
    queued_batches: int = 0
    paused: bool = False
    workers: tuple[WorkerStats, ...] = ()
    groups: Mapping[str, GroupStats] = field(default_factory=dict)
    retiring: int = 0
    """Workers that finish their work and then end."""
    queue_waits_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that producers waited for room, and consumers for a batch."""
    undurable_frames: int = 0
    """Frames in sealed batches that are not durable in the dataset yet; 0 without a dataset."""
    inference: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Totals of inference servers, by group: the fields of the message `Served`."""

    statistics: Mapping[str, StatisticsGlance] = field(default_factory=dict)
    """Normalization statistics by batch key."""

    def summary(self) -> Stats:
        """The same as the `Stats` that fleets and clients share."""
        return Stats(
            frames=self.frames,
            total_frames=self.total_frames,
            stepped_frames=self.stepped_frames,
            dropped=self.dropped,
            episodes=self.episodes,
            mean_return=self.mean_return,
            mean_length=self.mean_length,
            metric_means=self.metric_means,
            version=self.version,
            ready_workers=sum(group.ready for group in self.groups.values()),
            desired_workers=sum(group.desired for group in self.groups.values()),
            restarts=self.restarts,
            queued_batches=self.queued_batches,
            is_paused=self.paused,
        )

    @property
    def mean_return(self) -> float | None:
        """None before the first episode. NaN for inf and -inf, which fmean refuses."""
        return sum(self.recent_returns) / len(self.recent_returns) if self.recent_returns else None

    @property
    def mean_length(self) -> float | None:
        return fmean(self.recent_lengths) if self.recent_lengths else None

    @property
    def metric_means(self) -> dict[str, float | None]:
        """Means of `recent_metrics` by name, ignoring NaN; None: no values."""
        return _means(self.recent_metrics)

    @property
    def task_metric_means(self) -> dict[tuple[str, str], float | None]:
        """The same by name and variant; without variants, under an empty name."""
        return _means(self.recent_task_metrics or {(name, ""): v for name, v in self.recent_metrics.items()})


def _means(recent: Mapping[K, tuple[float, ...]]) -> dict[K, float | None]:
    numbers = {key: [value for value in values if isfinite(value)] for key, values in recent.items()}
    return {key: fmean(values) if values else None for key, values in numbers.items()}
