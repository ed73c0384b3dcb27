"""Statistics of a fleet: a snapshot, the state of published weights, and what is counted for them."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import fmean
from typing import Any, Literal

from cormorant_contract.fleet import Stats
from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker.envs.restarts import RESTART_WINDOW_S
from cormorant_worker.fleet.scheduler import SlotKey
from cormorant_worker.fleet.slot import WorkerHandle, WorkerStats
from cormorant_worker.normalize import StatisticsGlance
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion
from cormorant_worker.worker.messages import Sealed

RestartReason = Literal["crash", "hang", "error"]

_RECENT = 100
_MANY = 10
"""Environments keep failing where one worker restarts this many, or more, within RESTART_WINDOW_S: one a minute."""
_MOST_CHARACTERS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReceipts:
    """State of a published version."""

    version: PolicyVersion
    applied: tuple[str, ...]
    """Workers that use this version or a newer one."""
    waiting: tuple[str, ...]
    """Workers that will apply this version at their next batch."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reasons of the workers that refused this version or a newer one, by worker name."""


@dataclass(slots=True, kw_only=True)
class GroupStats:
    """One worker group, including workers that are gone. The fleet counts in one of its own and hands out copies."""

    desired: int = 0
    alive: int = 0
    """Workers that start or run."""
    versions: Counter[PolicyVersion] = field(default_factory=Counter)
    """Workers that may collect, by the version that acts in them."""
    stepped_frames: int = 0
    """So far."""
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    restarts: Counter[RestartReason] = field(default_factory=Counter)
    """Workers replaced so far, by reason."""
    env_restarts: int = 0

    @property
    def ready(self) -> int:
        """Workers that may collect."""
        return self.versions.total()

    @property
    def starting(self) -> int:
        return self.alive - self.ready


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
    recent: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """Metrics of the last 100 episodes, "return" and "length" among them, by name and variant; of all variants under an
    empty name. NaN for missing values."""
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
    def is_collected(self) -> bool:
        """Every frame of `totalFrames` is accepted: a fleet that was drained before is not."""
        return self.total_frames is not None and self.frames >= self.total_frames

    @property
    def min_version(self) -> PolicyVersion:
        """The oldest that acts in a worker; the published one while no worker may collect."""
        return min((version for group in self.groups.values() for version in group.versions), default=self.version)

    @property
    def mean_return(self) -> float | None:
        """None before the first episode. NaN for inf and -inf, which fmean refuses."""
        returns = self.recent.get(("return", ""))
        return sum(returns) / len(returns) if returns else None

    @property
    def mean_length(self) -> float | None:
        lengths = self.recent.get(("length", ""))
        return fmean(lengths) if lengths else None

    @property
    def metric_means(self) -> dict[str, float | None]:
        """Means of the manifest's metrics by name, ignoring NaN; None: no values."""
        own = {key: v for key, v in self.recent.items() if not key[1] and key[0] not in ("return", "length")}
        return {name: mean for (name, _), mean in _means(own).items()}

    @property
    def task_metric_means(self) -> dict[tuple[str, str], float | None]:
        """The same by name and variant, with return and length; without variants, `metric_means` under an empty one."""
        by_task = {key: values for key, values in self.recent.items() if key[1]}
        return _means(by_task) or {(name, ""): mean for name, mean in self.metric_means.items()}


def _means(recent: Mapping[tuple[str, str], tuple[float, ...]]) -> dict[tuple[str, str], float | None]:
    numbers = {key: [value for value in values if isfinite(value)] for key, values in recent.items()}
    return {key: fmean(values) if values else None for key, values in numbers.items()}


class FleetCounters:
    """Counters, and the last episodes. Guarded by the fleet's condition."""

    def __init__(self) -> None:
        self.episodes = 0
        self.undurable_frames = 0
        """Landed frames of living workers that their datasets do not have yet."""
        self.recent: defaultdict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        """See `FleetStats`."""
        self.task_episodes: Counter[str] = Counter()
        self.groups: defaultdict[str, GroupStats] = defaultdict(GroupStats)
        self.waits_s = {"producer": 0.0, "consumer": 0.0}
        """Seconds in which workers waited for room, and consumers for batches."""
        self.served: dict[str, dict[str, float]] = {}
        """By group, summed over inference servers that are gone, too: the fields of `Served`."""
        self._ticked = time.monotonic()
        self._was_full = self._was_asked = False

    def joined(self, group: str) -> None:
        self.groups[group].alive += 1

    def put_to_work(self, handle: WorkerHandle) -> None:
        self.groups[handle.slot.group].versions[handle.version] += 1

    def applied(self, handle: WorkerHandle, version: PolicyVersion) -> None:
        """Count that a worker changes its version. Called before the handle is updated."""
        if handle.has_worked:
            books = self.groups[handle.slot.group]
            books.versions -= Counter([handle.version])
            books.versions[version] += 1

    def parted(self, handle: WorkerHandle) -> None:
        books = self.groups[handle.slot.group]
        books.alive -= 1
        if handle.has_worked:
            books.versions -= Counter([handle.version])
        self.undurable_frames -= handle.landed_frames - handle.durable_frames

    def sealed(self, handle: WorkerHandle, sealed: Sealed) -> None:
        """Count a finished batch. Called before the handle is updated."""
        played = sealed.episodes
        self.episodes += len(played.returns)
        self.task_episodes.update(played.tasks)
        metrics: dict[str, Sequence[float]] = {"return": played.returns, "length": played.lengths, **played.metrics}
        for name, values in metrics.items():
            self.recent[name, ""].extend(values)
            for task, value in zip(played.tasks, values, strict=False):  # no tasks without variants
                self.recent[name, task].append(value)
        self.groups[handle.slot.group].env_restarts += sealed.env_restarts - handle.env_restarts
        self.undurable_frames += sealed.landed_frames - (sealed.durable_frames - handle.durable_frames)
        self.follow(handle)

    def follow(self, handle: WorkerHandle) -> None:
        """Update counts from a worker's heartbeat. They stay when the worker is gone."""
        books = self.groups[handle.slot.group]
        frames, spent = handle.stepped_frames, handle.connection.spent_ns
        books.stepped_frames += frames - handle.counted_frames
        if spent != handle.counted_ns:
            before = handle.counted_ns or (0,) * len(spent)
            for activity, now, then in zip(ACTIVITIES, spent, before, strict=True):
                books.spent_s[activity] += (now - then) / 1e9
        handle.counted_frames, handle.counted_ns = frames, spent

    def replaced(self, group: str, reason: RestartReason) -> None:
        self.groups[group].restarts[reason] += 1

    def tick(self, *, is_full: bool, is_asked: bool) -> None:
        """Add the waiting times since the last call, and say who waits from now on: workers for room, consumers for a
        batch.
        """
        now = time.monotonic()
        if self._was_full:
            self.waits_s["producer"] += now - self._ticked
        if self._was_asked:
            self.waits_s["consumer"] += now - self._ticked
        self._ticked, self._was_full, self._was_asked = now, is_full, is_asked

    def group(self, name: str, *, desired: int) -> GroupStats:
        books = self.groups[name]
        versions, restarts = books.versions.copy(), books.restarts.copy()
        return replace(books, desired=desired, versions=versions, restarts=restarts, spent_s=dict(books.spent_s))


class EnvFailures:
    """Failures of environments by slot. Guarded by the fleet's condition."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: defaultdict[SlotKey, deque[float]] = defaultdict(deque)
        self._first = ""

    def note(self, slot: SlotKey, worker: str, fields: Mapping[str, Any]) -> None:
        """Note that a worker restarted an environment. `fields`: fields of the log line."""
        self._recent[slot].append(self._clock())
        if not self._first:
            cause = f"environment {fields.get('env')} of worker {worker} {fields.get('reason')}"
            self._first = f"{cause}\n{fields.get('exception', '')}".strip()[:_MOST_CHARACTERS]

    def recent(self, slot: SlotKey) -> int:
        """Environments of a slot that were restarted within RESTART_WINDOW_S."""
        if slot not in self._recent:
            return 0
        recent, now = self._recent[slot], self._clock()
        while recent and now - recent[0] >= RESTART_WINDOW_S:
            recent.popleft()
        return len(recent)

    def sentence(self, *, dropped: int) -> str:
        """That environments keep failing: how often, `dropped` frames (for any reason), and the first traceback; empty:
        not so.
        """
        recent = [self.recent(slot) for slot in self._recent]
        if max(recent, default=0) < _MANY:
            return ""
        began = min(times[0] for times in self._recent.values() if times)
        rate = f"{sum(recent):,} restarts in {self._clock() - began:,.0f} s, {dropped:,} frames dropped"
        return f"environments keep failing: {rate}; the first: {self._first}"
