"""Plays episodes so that each is a pure function of (weights, task, seed, options). Used by workers.

An episode depends on nothing that a fleet decides:

- environments: a new one for each episode, reset once with the episode's seed;
- inference: one row per call, because a network's rounding depends on the number of rows and on a row's position;
- the policy: its own copy, because `forward` may change buffers; parameters are shared;
- noise: torch's, numpy's and Python's generators are swapped for the episode's own around each call;
- threads: one in torch.

Decision 0039 has the measurements. Environments step in parallel, as many as the manifest's numEnvs.
"""

import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.random import mtrand

from cormorant_contract.env import Env, GymnasiumEnv
from cormorant_contract.episodes import PlannedEpisode, files_of
from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.agents_actor import AgentsActor
from cormorant_worker.collect.build import build_collector, statistics_for
from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.overrides import NO_OVERRIDES, WorkerOverrides
from cormorant_worker.collect.place import TorchStream, WorkerPlace
from cormorant_worker.collect.trajectories import EpisodeMetrics
from cormorant_worker.envs.gymnasium_env import Env as OneEnv
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.kinds import kind_of
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.envs.request import EnvRequest
from cormorant_worker.envs.restarts import RestartLimits
from cormorant_worker.errors import EnvCrashed, EnvError, EnvRaised, EvaluationError
from cormorant_worker.evaluation.results import PlayedEpisode, ResultFolder, ResultTable, name_of, planned_episodes
from cormorant_worker.policy.action_check import ActionCheck
from cormorant_worker.policy.actor import Actor, PolicyActor
from cormorant_worker.policy.exploration import ExplorationType, exploring
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays
from cormorant_worker.weights.blob import read_file

LONGEST = 100_000
"""Steps after which an episode without its own limit is aborted."""


@dataclass(slots=True, kw_only=True)
class _Seat:
    planned: PlannedEpisode
    actor: Actor
    noise: int
    """Seed of the episode's noise."""
    stream: TorchStream
    numpy_stream: np.random.MT19937
    inputs: Arrays
    """[1, ...] each leaf of the observation."""
    states: Arrays
    """[1, ...] each recurrent state."""
    is_init: Array
    info: list[list[Array]]
    """By leaf of a step's info, its value at every step; empty where no metric reads them."""
    returns: dict[str, float] = field(default_factory=dict)
    """By group of agents."""
    total: float = 0.0
    length: int = 0


class Player:
    """Plays a job's episodes with one policy. Used by the thread that steps."""

    def __init__(
        self,
        job: CollectorJob,
        collector: Collector,
        *,
        overrides: WorkerOverrides = NO_OVERRIDES,
        max_threads: int = 1,
    ) -> None:
        """Take a collector's policy, whose weights stay, its gate and its count of steps, but not its environments."""
        assert job.spec.collection.episodes is not None
        assert job.spec.output.dataset is not None
        self._job, self._actor, self._overrides = job, collector.actor, overrides
        self._gate, self._frames, self._max_threads = collector.gate, collector.pulse, max_threads
        self._planned = planned_episodes(job)
        if isinstance(self._actor, AgentsActor) and len(job.spec.collection.episodes.checkpoints or ()) > 1:
            self._actor.refuse_scripts()
        self.film: Path | None = None
        """MP4 file to record the next episode in."""
        self.on_building: Callable[[bool], None] = lambda is_building: None
        """Told when environments begin to be built, which may take long, and when they stand at their first steps."""
        self._folder = ResultFolder(job.spec.output.dataset.uri)
        self._weights = collector.weights
        self._weights.set_evaluating()
        self._checkpoint = ""
        """Checkpoint whose weights act; empty: the collector's own weights."""
        asked = ExplorationType(job.spec.policy.exploration_type)
        self._exploration = ExplorationType.RANDOM
        if job.spec.collection.episodes.deterministic:
            self._exploration = ExplorationType.DETERMINISTIC if asked is ExplorationType.RANDOM else asked
        self._limit = job.spec.env.max_episode_steps or LONGEST

    def play(self, positions: Sequence[int]) -> list[PlayedEpisode]:
        """Play episodes of the plan side by side, each in an environment of its own. Raises Stopped and the errors of
        environments (also for an episode that does not end), of the policy, and of a checkpoint's weights.
        """
        together: dict[tuple[str, str], list[int]] = {}
        for position in positions:
            planned = self._planned[position]
            together.setdefault((planned.checkpoint, planned.task), []).append(position)
        played: dict[int, PlayedEpisode] = {}
        outside = random.getstate()
        try:
            for (checkpoint, task), own in together.items():
                if checkpoint != self._checkpoint:
                    read = partial(read_file, allow_nonfinite=self._job.spec.policy.allow_nonfinite)
                    if isinstance(self._actor, AgentsActor):
                        for group, uri in files_of(checkpoint).items():
                            self._actor.load(group, read(uri), where=f" in {uri}")
                    else:
                        statistics = statistics_for(self._job.spec.collection.normalize, checkpoint)
                        self._weights.load(read(checkpoint), statistics, where=f" in {checkpoint}")
                    self._checkpoint = checkpoint
                found = self._play_task(task, [self._planned[position] for position in own])
                played.update(zip(own, found, strict=True))
        finally:
            random.setstate(outside)
        return [played[position] for position in positions]

    def _play_task(self, task: str, planned: Sequence[PlannedEpisode]) -> list[PlayedEpisode]:
        try:
            self.on_building(True)
            block = self._job.spec.env
            variant = next((variant for variant in block.variants or () if variant.name == task), None)
            env = build_envs(
                block if variant is None else block.of_variant(variant),
                planned,
                self._overrides,
                max_threads=self._max_threads,
                film=self.film,
            )
            try:
                first = env.start()
                self.on_building(False)
                with torch.no_grad(), exploring(self._exploration):
                    return self._play(env, first, planned)
            finally:
                env.close()
        except EnvCrashed as error:
            named = [planned[error.row]] if error.row >= 0 else planned
            which = "the episode" if len(named) == 1 else "one of the episodes"
            message = f"{error} (in {which} with {'; '.join(map(name_of, named))})"
            kind = EnvRaised if isinstance(error, EnvRaised) else EnvCrashed
            raise kind(message, row=error.row, has_stepped=error.has_stepped) from error

    def record(self, played: Sequence[PlayedEpisode]) -> None:
        self._folder.record(played)

    def _play(self, env: VectorEnv, first: Arrays, planned: Sequence[PlannedEpisode]) -> list[PlayedEpisode]:
        check = ActionCheck(env.action_space)
        metrics = EpisodeMetrics(self._job.spec.collection.episode_metrics or (), env.info_leaves, len(planned))
        seats = {
            row: self._seat(episode, tuple(leaf[row : row + 1] for leaf in first), env)
            for row, episode in enumerate(planned)
        }
        of_groups = [(leaf.key, i) for i, leaf in enumerate(env.info_leaves) if leaf.key[0] != "info"]
        rewards = [(group, i) for (group, what), i in of_groups if what == "reward"]
        played: dict[int, PlayedEpisode] = {}
        while seats:
            if self._gate.is_closed:
                self._gate.wait_while_paused()
            rows = np.fromiter(seats, dtype=np.int64)
            if env.illegal is not None:
                for row, seat in seats.items():
                    if isinstance(seat.actor, RandomActor):
                        seat.actor.illegal = env.illegal[row : row + 1]
            chosen = [self._act(seat) for seat in seats.values()]
            actions = tuple(np.concatenate(parts) for parts in zip(*chosen, strict=True))
            check.values(actions)
            env.send(actions, rows)
            step = env.recv()
            self._frames += len(rows)
            if len(step.fresh):
                row = int(rows[step.fresh[0]])
                raise EnvCrashed(f"the environment of the episode with {name_of(planned[row])} had to be restarted")
            ended = set(step.ended.tolist())
            for position, row in enumerate(rows.tolist()):
                seat = seats[row]
                seat.total += float(step.reward[position])
                seat.length += 1
                for group, i in rewards:
                    own = float(step.info[i][position].sum(dtype=np.float64))
                    seat.returns[group] = seat.returns.get(group, 0.0) + own
                for gathered, leaf in zip(seat.info, step.info, strict=False):
                    gathered.append(leaf[position].copy())
                if not math.isfinite(seat.total):
                    raise EnvError(
                        f"the episode with {name_of(seat.planned)} has a return of {seat.total} after {seat.length:,} "
                        "steps, which no table can sum up; return finite rewards"
                    )
                if position in ended:
                    numbers = metrics.of_episode([np.stack(gathered) for gathered in seat.info])
                    played[row] = PlayedEpisode(
                        checkpoint=seat.planned.checkpoint,
                        task=seat.planned.task,
                        seed=seat.planned.seed,
                        options=seat.planned.options,
                        total=seat.total,
                        length=seat.length,
                        terminated=bool(step.terminated[position]),
                        metrics={name: value for name, value in numbers.items() if math.isfinite(value)},
                        returns=seat.returns,
                    )
                    del seats[row]
                    continue
                if seat.length >= self._limit:
                    raise EnvError(
                        f"the episode with {name_of(seat.planned)} has not ended after {seat.length:,} steps; set "
                        "env.maxEpisodeSteps"
                    )
                for kept, leaf in zip(seat.inputs, step.obs, strict=True):
                    kept[0] = leaf[position]
        return [played[row] for row in range(len(planned))]

    def _seat(self, planned: PlannedEpisode, first: Arrays, env: VectorEnv) -> _Seat:
        seeds = np.random.SeedSequence([planned.seed, zlib.crc32(planned.start.encode())])
        noise = int(seeds.generate_state(1, np.uint64)[0] >> np.uint64(1))
        actor = self._actor
        if isinstance(actor, RandomActor):
            actor = RandomActor(env.action_space, noise, observation=env.observation_space)
        elif isinstance(actor, AgentsActor):
            actor = actor.twin(RandomActor(env.action_space, noise, observation=env.observation_space))
        elif isinstance(actor, PolicyActor):
            actor = actor.twin()
        return _Seat(
            planned=planned,
            actor=actor,
            noise=noise,
            stream=TorchStream(noise, actor.device),
            numpy_stream=np.random.MT19937(noise),
            inputs=tuple(_aligned(leaf) for leaf in first),
            states=tuple(_aligned(state) for state in actor.initial_states),
            is_init=np.ones(1, dtype=np.bool_),
            info=[[] for _ in env.info_leaves] if self._job.spec.collection.episode_metrics else [],
        )

    def _act(self, seat: _Seat) -> Arrays:
        """[1, ...] each leaf of the action."""
        outside = mtrand.get_bit_generator()
        mtrand.set_bit_generator(seat.numpy_stream)
        # Python's generator takes long to save: each call has a seed of its own.
        random.seed(seat.noise + seat.length)
        try:
            with seat.stream:
                acted = seat.actor.act(seat.inputs, seat.states, seat.is_init)
        finally:
            mtrand.set_bit_generator(outside)
        for kept, state in zip(seat.states, acted.states, strict=True):
            kept[...] = state
        seat.is_init[0] = False
        return tuple(action.copy() for action in acted.actions)


def alone(job: CollectorJob) -> CollectorJob:
    """The job with one environment, whose policy is called uncompiled on one row, also in its dry run."""
    env, policy = job.spec.env, job.spec.policy.model_copy(update={"compile": "off"})
    if env.variants:
        env = env.of_variant(env.variants[0])
    env = env.with_block({"num_envs": 1, "batch_size": 0, "vectorization": "inline"})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"env": env, "policy": policy})})


def build_envs(
    env: Env,
    planned: Sequence[PlannedEpisode],
    overrides: WorkerOverrides,
    *,
    max_threads: int = 1,
    film: Path | None = None,
) -> VectorEnv:
    """New environments, one an episode, in lockstep; with `film`, in this process and recorded."""
    seeds = [episode.seed for episode in planned]
    if film is not None and not isinstance(env.block, GymnasiumEnv):
        raise EnvError(
            f"{env.block.title}'s {env.name} cannot be recorded; use the single gymnasium environment of that name"
        )

    def wrap(source: EnvSource) -> EnvSource:
        if any(episode.options for episode in planned):
            options = tuple(dict(episode.options) for episode in planned)
            source = _Wrapped(source, partial(_ResetOptions, options=options))
        return source if film is None else _Wrapped(source, partial(_Filming, film=film))

    request = EnvRequest(
        env=env.with_block({"num_envs": len(seeds)}),
        seeds_of=lambda num_envs: seeds,
        makers=overrides.envs,
        limits=RestartLimits(total=0, raises=True),
        max_threads=max_threads,
        is_filmed=film is not None,
    )
    return kind_of(env).open_episodes(request, wrap)


@dataclass(frozen=True)
class _Wrapped(EnvSource):
    source: EnvSource
    wrap: Callable[[OneEnv, int], OneEnv]
    """Gets an environment and its row. It is pickled where environments are subprocesses."""

    @property
    def name(self) -> str:
        return self.source.name

    def build(self, row: int) -> OneEnv:
        return self.wrap(self.source.build(row), row)


class _ResetOptions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Every reset gets the options of the row's episode."""

    def __init__(self, env: OneEnv, row: int, *, options: Sequence[dict[str, Any]]) -> None:
        super().__init__(env)
        self._given = options[row]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed, options={**self._given, **(options or {})})


class _Filming(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Writes a picture of each observation of one episode into an MP4 file."""

    def __init__(self, env: OneEnv, row: int, *, film: Path) -> None:
        super().__init__(env)
        self._film = film
        self._writer: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        found = self.env.reset(seed=seed, options=options)
        if self._writer is None:  # later ones follow the end of the episode
            self._show()
        return found

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        found = self.env.step(action)
        self._show()
        return found

    def _show(self) -> None:
        picture = np.asarray(self.env.render())
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise EnvError(
                f"the environment rendered {picture.dtype} of shape {list(picture.shape)} for rgb_array, not uint8 "
                "[height, width, 3]; it cannot be recorded"
            )
        if self._writer is None:
            import imageio_ffmpeg

            height, width, _ = picture.shape
            rate = float(self.env.metadata.get("render_fps", 30))
            self._writer = imageio_ffmpeg.write_frames(str(self._film), (width, height), fps=rate, macro_block_size=2)
            self._writer.send(None)
        self._writer.send(np.ascontiguousarray(picture))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self.env.close()


def record_videos(
    job: CollectorJob, table: ResultTable, count: int, folder: Path, *, overrides: WorkerOverrides = NO_OVERRIDES
) -> list[Path]:
    """Record the first episodes of a table as MP4, one file each. Raises EvaluationError without imageio-ffmpeg, or
    where an episode ends differently while it is recorded; EnvError where the environment does not render.
    """
    try:
        import imageio_ffmpeg  # noqa: F401  # asked for before anything is played
    except ModuleNotFoundError as error:
        raise EvaluationError(
            "videos need imageio-ffmpeg, which is not installed: pip install 'cormorant[video]'"
        ) from error
    collector = build_collector(alone(job), WorkerPlace(seed=job.spec.collection.seed), overrides)
    collector.close()
    player, files = Player(job, collector, overrides=overrides), []
    for position, row in enumerate(table.episodes[:count]):
        path = folder / f"{row.task or 'episode'}-{position}-seed-{row.seed}.mp4"
        folder.mkdir(parents=True, exist_ok=True)
        player.film = path
        (played,) = player.play([position])
        if (played.total, played.length) != (row.total, row.length):
            raise EvaluationError(
                f"the episode with seed {row.seed} returned {row.total!r} in {row.length} steps, and {played.total!r} "
                f"in {played.length} while it was recorded: the environment acts differently when it renders"
            )
        files.append(path)
    return files


def _aligned(array: Array) -> Array:
    """A copy that begins where torch's own tensors do: a library may sum in another order elsewhere."""
    copy: Array = torch.empty(array.shape, dtype=torch.from_numpy(np.ascontiguousarray(array)).dtype).numpy()
    copy[...] = array
    return copy
