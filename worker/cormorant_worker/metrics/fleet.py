"""A fleet's metrics: what its events tell, batch by batch, and what its books say, a few times a second."""

import platform
import threading
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from statistics import fmean

from cormorant_contract.job import CollectorJob
from cormorant_contract.metrics import head as declared
from cormorant_contract.metrics.labels import ACTIVITIES, BOUND, END
from cormorant_worker.fleet.events import FleetEvent
from cormorant_worker.fleet.stats import FleetStats, GroupStats
from cormorant_worker.metrics.exposition import Exposition, Rising, observe_all
from cormorant_worker.metrics.gpus import read_gpus
from cormorant_worker.normalize.moments import StatisticsGlance
from cormorant_worker.worker.messages import Sealed

_SERVED = {
    "rows": declared.INFERENCE_ROWS,
    "padded_rows": declared.INFERENCE_PADDED_ROWS,
    "acts": declared.INFERENCE_ACTS,
    "requests": declared.INFERENCE_REQUESTS,
    "wait_s": declared.INFERENCE_WAIT,
    "act_s": declared.INFERENCE_ACT,
}
"""By field of the message `Served`."""
_SIDES = ("producer", "consumer")


class FleetMetrics:
    """What is exported of one fleet. `hear` is for the fleet's thread, `sample` for any."""

    def __init__(self, job: CollectorJob, exposition: Exposition, *, floor_frames: int = 0) -> None:
        """Begin.

        Args:
            exposition: has the contract's `FLEET_METRICS`.
            floor_frames: what earlier processes have exported of `frames_total`.
        """
        self._job, self._exposition = job, exposition
        self._env = name_of_env(job)
        self.frames = exposition.rising(declared.FRAMES, floor=floor_frames, env=self._env)
        self._published = exposition.gauge(declared.POLICY_VERSION_PUBLISHED)
        self._queued = exposition.gauge(declared.QUEUE_BATCHES)
        self._waits = {side: exposition.rising(declared.QUEUE_WAIT, side=side) for side in _SIDES}
        self._paused = exposition.gauge(declared.PAUSED)
        self._paused_s = exposition.counter(declared.PAUSE_SECONDS)
        self._groups = {
            group.name: _GroupMetrics(group.name, self._env, exposition) for group in job.spec.worker_groups
        }
        self._dropped: dict[str, Rising] = {}
        self._served: dict[tuple[str, str], Rising] = {}
        self._episodes = {end: exposition.counter(declared.EPISODES, env=self._env, end=end) for end in END.values}
        self._returns = exposition.histogram(declared.EPISODE_RETURN, env=self._env)
        self._lengths = exposition.histogram(declared.EPISODE_LENGTH, env=self._env)
        self._staleness = exposition.histogram(declared.STALENESS)
        self._sampling = threading.Lock()
        """Held while books are read and copied: two at a time would count a pause twice."""
        self._sampled_at = time.monotonic()
        self._was_paused = False
        self._describe_what_stays()

    def hear(self, event: FleetEvent) -> None:
        if event.sealed is not None:
            self._groups[event.worker.rpartition("-")[0]].seal(event.sealed)
            self._note_episodes(event.sealed)
        elif event.kind == "lent":
            self._staleness.observe(event.staleness)

    def sample(self, stats: FleetStats) -> None:
        with self._sampling:
            now = time.monotonic()
            if self._was_paused:
                self._paused_s.inc(now - self._sampled_at)
            self._sampled_at, self._was_paused = now, stats.paused
            self.frames.follow(stats.frames)
            self._published.set(stats.version)
            self._queued.set(stats.queued_batches)
            self._paused.set(stats.paused)
            for side, seconds in stats.queue_waits_s.items():
                self._waits[side].follow(seconds)
            for reason, frames in stats.dropped.items():
                self.dropped(reason).follow(frames)
            for name, group in stats.groups.items():
                self._groups[name].sample(group, is_paused=stats.paused)
            if stats.recent_returns:
                self._exposition.gauge(declared.RECENT_RETURN, env=self._env).set(fmean(stats.recent_returns))
                self._exposition.gauge(declared.RECENT_LENGTH, env=self._env).set(fmean(stats.recent_lengths))
            for (name, task), mean in stats.task_metric_means.items():
                if mean is not None:
                    self._exposition.gauge(declared.EPISODE_METRIC, name=name, task=task).set(mean)
            for key, statistics in stats.statistics.items():
                self._show_statistics(key, statistics)
            if self._job.spec.output.dataset is not None:
                self._exposition.gauge(declared.SINK_LAG).set(stats.undurable_frames)
            for name, served in stats.inference.items():
                self._serve(name, served)
            self._sample_gpus()

    def _serve(self, group: str, served: Mapping[str, float]) -> None:
        for name, number in served.items():
            if (group, name) not in self._served:
                self._served[group, name] = self._exposition.rising(_SERVED[name], group=group)
            self._served[group, name].follow(number)

    def _show_statistics(self, key: str, statistics: StatisticsGlance) -> None:
        gauge = self._exposition.gauge
        gauge(declared.NORMALIZE_FRAMES, key=key).set(statistics.frames)
        gauge(declared.NORMALIZE_PUBLISHED, key=key).set(statistics.published_frames)
        for i, bound in enumerate(BOUND.values):
            gauge(declared.NORMALIZE_MEAN, key=key, bound=bound).set(statistics.mean[i])
            gauge(declared.NORMALIZE_STD, key=key, bound=bound).set(statistics.std[i])

    def dropped(self, reason: str) -> Rising:
        if reason not in self._dropped:
            self._dropped[reason] = self._exposition.rising(declared.FRAMES_DROPPED, reason=reason)
        return self._dropped[reason]

    def _note_episodes(self, sealed: Sealed) -> None:
        if not sealed.returns:
            return
        self._episodes["terminated"].inc(sealed.num_terminated)
        self._episodes["truncated"].inc(len(sealed.returns) - sealed.num_terminated)
        observe_all(self._returns, sealed.returns)
        observe_all(self._lengths, sealed.lengths)

    def _describe_what_stays(self) -> None:
        spec = self._job.spec
        if spec.target is not None:
            self._exposition.gauge(declared.TARGET_FRAMES).set(spec.target)
        if spec.output.queue is not None:
            self._exposition.gauge(declared.QUEUE_CAPACITY).set(spec.output.queue.capacity_batches)
        for reason in ("crash", "stale"):
            self.dropped(reason)
        self._exposition.gauge(
            declared.BUILD_INFO,
            version=_version("cormorant"),
            python=platform.python_version(),
            torch=_version("torch"),
        ).set(1)

    def _sample_gpus(self) -> None:
        for gpu in read_gpus():
            self._exposition.gauge(declared.GPU_UTILIZATION, gpu=gpu.index).set(gpu.utilization)
            self._exposition.gauge(declared.GPU_MEMORY, gpu=gpu.index).set(gpu.used_bytes)


class _GroupMetrics:
    def __init__(self, name: str, env: str, exposition: Exposition) -> None:
        self._stepped = exposition.rising(declared.STEPPED_FRAMES, group=name, env=env)
        self._spent = {a: exposition.rising(declared.PHASE_SECONDS, group=name, phase=a) for a in ACTIVITIES}
        self._idle_before = 0.0
        self._idle_s = self._held_s = 0.0
        """Seconds that workers were idle while the fleet ran, and while it was paused."""
        self._version = exposition.gauge(declared.POLICY_VERSION, group=name)
        self._workers = {
            state: exposition.gauge(declared.WORKERS, group=name, state=state)
            for state in ("desired", "ready", "starting")
        }
        self._restarts = {
            reason: exposition.rising(declared.WORKER_RESTARTS, group=name, reason=reason)
            for reason in ("crash", "hang", "error")
        }
        self._env_restarts = exposition.rising(declared.ENV_RESTARTS, group=name)
        self._batch = exposition.histogram(declared.BATCH, group=name)
        self._env_step = exposition.histogram(declared.ENV_STEP, group=name)
        self._inference = exposition.histogram(declared.INFERENCE, group=name)

    def seal(self, sealed: Sealed) -> None:
        timing = sealed.timing
        self._batch.observe(timing.seconds)
        if timing.env_step_s or timing.inference_s:
            self._env_step.observe(timing.env_step_s)
            self._inference.observe(timing.inference_s)

    def sample(self, stats: GroupStats, *, is_paused: bool) -> None:
        self._stepped.follow(stats.stepped_frames)
        self._follow_time(stats, is_paused=is_paused)
        self._version.set(stats.min_version)
        self._workers["desired"].set(stats.desired)
        self._workers["ready"].set(stats.ready)
        self._workers["starting"].set(stats.starting)
        for reason, restarts in stats.restarts.items():
            self._restarts[reason].follow(restarts)
        self._env_restarts.follow(stats.env_restarts)

    def _follow_time(self, stats: GroupStats, *, is_paused: bool) -> None:
        spent = dict(stats.spent_s)
        # A worker between two batches does not know that it would not get another one: the fleet does.
        passed = max(0.0, spent["idle"] - self._idle_before)
        self._idle_before += passed
        if is_paused:
            self._held_s += passed
        else:
            self._idle_s += passed
        spent["idle"] = self._idle_s
        spent["paused"] += self._held_s
        for activity, seconds in spent.items():
            self._spent[activity].follow(seconds)


def name_of_env(job: CollectorJob) -> str:
    """The environment in one word: EnvPool's task, gymnasium's id, or the entrypoint."""
    env = job.spec.env
    if env.envpool is not None:
        return env.envpool.task_id
    assert env.gymnasium is not None
    return env.gymnasium.id or env.gymnasium.entrypoint or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
