"""Statistics of a fleet: current and past workers, failures of environments, and waiting times."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker.envs.restarts import RESTART_WINDOW_S
from cormorant_worker.fleet.scheduler import SlotKey
from cormorant_worker.fleet.slot import WorkerHandle
from cormorant_worker.fleet.stats import GroupStats, RestartReason
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker.messages import Sealed

_RECENT = 100
_MANY = 10
"""Environments keep failing where one worker restarts this many, or more, within RESTART_WINDOW_S: one a minute."""
_MOST_CHARACTERS = 4000


class FleetCounters:
    """Counters, and the last episodes. Guarded by the fleet's condition."""

    def __init__(self) -> None:
        self.episodes = 0
        self.undurable_frames = 0
        """Landed frames of living workers that their datasets do not have yet."""
        self.returns: deque[float] = deque(maxlen=_RECENT)
        self.lengths: deque[int] = deque(maxlen=_RECENT)
        self.metrics: dict[str, deque[float]] = {}
        self.task_metrics: dict[tuple[str, str], deque[float]] = {}
        """By metric (return and length, too) and variant."""
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
        books = self.groups[handle.slot.group]
        books.versions[handle.version] += 1
        books.policy_call = handle.policy_call

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
        self.episodes += len(sealed.returns)
        self.returns.extend(sealed.returns)
        self.lengths.extend(sealed.lengths)
        for name, values in sealed.metrics.items():
            self.metrics.setdefault(name, deque(maxlen=_RECENT)).extend(values)
        self.task_episodes.update(sealed.tasks)
        for name, values in (("return", sealed.returns), ("length", sealed.lengths), *sealed.metrics.items()):
            for task, value in zip(sealed.tasks, values, strict=False):  # no tasks without variants
                self.task_metrics.setdefault((name, task), deque(maxlen=_RECENT)).append(value)
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
