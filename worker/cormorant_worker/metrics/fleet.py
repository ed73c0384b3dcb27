"""A fleet's metrics: what its events tell, batch by batch, and what its books say, a few times a second."""

import platform
import threading
import time
from collections import Counter
from importlib.metadata import version
from typing import get_args

from cormorant_contract.job import CollectorJob
from cormorant_contract.metrics import head as declared
from cormorant_contract.metrics.labels import BOUND, END, SIDE
from cormorant_worker.fleet.events import FleetEvent
from cormorant_worker.fleet.stats import FleetStats, GroupStats, RestartReason
from cormorant_worker.metrics.exposition import Exposition, observe_all
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


class FleetMetrics:
    """Metrics of one fleet. `on_fleet_event` is for the fleet's thread, `sample` for any."""

    def __init__(self, job: CollectorJob, exposition: Exposition, *, floor_frames: int = 0) -> None:
        """Begin, on an exposition of `HEAD_METRICS`. `floor_frames`: what earlier processes have exported of
        `frames_total`.
        """
        self._job, self._exposition = job, exposition
        self._env = job.spec.env.name
        self._groups = {
            group.name: _GroupMetrics(group.name, self._env, exposition) for group in job.spec.worker_groups
        }
        self._episodes = {end: exposition.series(declared.EPISODES, env=self._env, end=end) for end in END.values}
        self._returns = exposition.series(declared.EPISODE_RETURN, env=self._env)
        self._lengths = exposition.series(declared.EPISODE_LENGTH, env=self._env)
        self._staleness = exposition.series(declared.STALENESS)
        self._paused_s = exposition.series(declared.PAUSE_SECONDS)
        self._sampling = threading.Lock()
        """Held while books are read and copied: two at a time would count a pause twice."""
        self._sampled_at = time.monotonic()
        self._was_paused = False
        spec, show = job.spec, exposition.show
        if spec.target is not None:
            show(declared.TARGET_FRAMES, spec.target)
        if spec.output.queue is not None:
            show(declared.QUEUE_CAPACITY, spec.output.queue.capacity_batches)
        ours, torch = version("cormorant"), version("torch")
        show(declared.BUILD_INFO, 1, version=ours, python=platform.python_version(), torch=torch)
        # Zeros, so that every series exists before the fleet does.
        zeros = FleetStats(
            frames=floor_frames,
            dropped={"crash": 0, "stale": 0},
            groups=dict.fromkeys(self._groups, GroupStats(restarts=Counter(dict.fromkeys(get_args(RestartReason), 0)))),
            queue_waits_s=dict.fromkeys(SIDE.values, 0.0),
        )
        self.sample(zeros)

    def on_fleet_event(self, event: FleetEvent) -> None:
        if event.sealed is not None:
            sealed, played = event.sealed, event.sealed.episodes
            self._groups[event.worker.rpartition("-")[0]].seal(sealed)
            if sealed.agent_steps:
                self._exposition.series(declared.AGENT_STEPS, env=self._env).inc(sealed.agent_steps)
            if played.returns:
                self._episodes["terminated"].inc(played.num_terminated)
                self._episodes["truncated"].inc(len(played.returns) - played.num_terminated)
                observe_all(self._returns, played.returns)
                observe_all(self._lengths, played.lengths)
        elif event.kind == "lent":
            self._staleness.observe(event.staleness)

    def sample(self, stats: FleetStats) -> None:
        with self._sampling:
            now = time.monotonic()
            if self._was_paused:
                self._paused_s.inc(now - self._sampled_at)
            self._sampled_at, self._was_paused = now, stats.paused
            show = self._exposition.show
            show(declared.FRAMES, stats.frames, env=self._env)
            show(declared.POLICY_VERSION_PUBLISHED, stats.version)
            show(declared.QUEUE_BATCHES, stats.queued_batches)
            show(declared.PAUSED, stats.paused)
            for side, seconds in stats.queue_waits_s.items():
                show(declared.QUEUE_WAIT, seconds, side=side)
            for reason, frames in stats.dropped.items():
                show(declared.FRAMES_DROPPED, frames, reason=reason)
            for name, group in stats.groups.items():
                self._groups[name].sample(group, is_paused=stats.paused, published=stats.version)
            if stats.mean_return is not None and stats.mean_length is not None:
                show(declared.RECENT_RETURN, stats.mean_return, env=self._env)
                show(declared.RECENT_LENGTH, stats.mean_length, env=self._env)
            for (name, task), mean in stats.task_metric_means.items():
                if mean is not None:
                    show(declared.EPISODE_METRIC, mean, name=name, task=task)
            for key, statistics in stats.statistics.items():
                show(declared.NORMALIZE_FRAMES, statistics.frames, key=key)
                show(declared.NORMALIZE_PUBLISHED, statistics.published_frames, key=key)
                for i, bound in enumerate(BOUND.values):
                    show(declared.NORMALIZE_MEAN, statistics.mean[i], key=key, bound=bound)
                    show(declared.NORMALIZE_STD, statistics.std[i], key=key, bound=bound)
            if self._job.spec.output.dataset is not None:
                show(declared.SINK_LAG, stats.undurable_frames)
            for name, served in stats.inference.items():
                for field, number in served.items():
                    show(_SERVED[field], number, group=name)


class _GroupMetrics:
    def __init__(self, name: str, env: str, exposition: Exposition) -> None:
        self._name, self._env, self._exposition = name, env, exposition
        self._idle_before = 0.0
        self._idle_s = self._held_s = 0.0
        """Seconds that workers were idle while the fleet ran, and while it was paused."""
        self._batch = exposition.series(declared.BATCH, group=name)
        self._env_step = exposition.series(declared.ENV_STEP, group=name)
        self._inference = exposition.series(declared.INFERENCE, group=name)

    def seal(self, sealed: Sealed) -> None:
        timing = sealed.timing
        self._batch.observe(timing.seconds)
        if timing.env_step_s or timing.inference_s:
            self._env_step.observe(timing.env_step_s)
            self._inference.observe(timing.inference_s)

    def sample(self, stats: GroupStats, *, is_paused: bool, published: int) -> None:
        show, name = self._exposition.show, self._name
        show(declared.STEPPED_FRAMES, stats.stepped_frames, group=name, env=self._env)
        # A worker between two batches does not know that it would not get another one: the fleet does.
        passed = max(0.0, stats.spent_s["idle"] - self._idle_before)
        self._idle_before += passed
        if is_paused:
            self._held_s += passed
        else:
            self._idle_s += passed
        spent = {**stats.spent_s, "idle": self._idle_s, "paused": stats.spent_s["paused"] + self._held_s}
        for activity, seconds in spent.items():
            show(declared.PHASE_SECONDS, seconds, group=name, phase=activity)
        show(declared.POLICY_VERSION, min(stats.versions, default=published), group=name)
        workers = {"desired": stats.desired, "ready": stats.ready, "starting": stats.starting}
        for state, number in workers.items():
            show(declared.WORKERS, number, group=name, state=state)
        for reason, restarts in stats.restarts.items():
            show(declared.WORKER_RESTARTS, restarts, group=name, reason=reason)
        show(declared.ENV_RESTARTS, stats.env_restarts, group=name)
