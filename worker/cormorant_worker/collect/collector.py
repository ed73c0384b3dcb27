"""Collector: environments + policy, stepping in this process, filling one block per call.

    recv -> act -> send -> write row t          for each EnvGroup in turn, until every column has its rows

Used in this process by scripts (`collect`), and by worker processes that bring their own blocks (`fill`).

# B envs over all groups, T steps, n rows (environments that act now)
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
import torch

from cormorant_contract.info import EpisodeMetric
from cormorant_worker.collect.async_env_group import AsyncEnvGroup
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.env_group import EnvGroup, FirstFrames, LockstepEnvGroup
from cormorant_worker.collect.pause_gate import PauseGate
from cormorant_worker.collect.place import TorchStream, WorkerPlace
from cormorant_worker.collect.rollout import rollout_of
from cormorant_worker.collect.state import FORMAT, read_metadata, under
from cormorant_worker.collect.timing import IDLE, PAUSED, Timing
from cormorant_worker.collect.trajectories import BatchMoments, EpisodeMetrics, Episodes, Trajectories, trajectory_base
from cormorant_worker.envs.cpus import OneCpu
from cormorant_worker.envs.protocol import VectorEnv, same_spaces
from cormorant_worker.envs.request import Assignment
from cormorant_worker.errors import EnvError, EnvNotSaved, StateError
from cormorant_worker.inference.remote_actor import RemoteActor
from cormorant_worker.normalize import Statistics, StatisticsBook
from cormorant_worker.policy.action_check import ActionCheck
from cormorant_worker.policy.actor import Actor
from cormorant_worker.policy.exploration import ExplorationType, exploring
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays, leaves
from cormorant_worker.weights.staged import RANDOM_VERSION, PolicyVersion, StagedWeights

if TYPE_CHECKING:
    from tensordict import TensorDict

_EPISODE_ROWS = 64
"""Rows of the block in which whole episodes are played."""
_LONGEST_SHARE = 10_000_000
"""Most frames that one environment may take for its share of whole episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorConfig:
    seeds: WorkerPlace
    """Decides the random streams and the ids of trajectories."""
    max_frames_per_trajectory: int = 0
    """Cut trajectories at this length, truncated; 0 = never."""
    reset_at_each_batch: bool = False
    """Begin every batch with new episodes."""
    variants: Assignment | None = None
    """Assignment of variants to environments; None without variants."""
    has_team_reward: bool = False
    """See `Layout`."""
    init_random_frames: int = 0
    """Number of frames at the start with random actions."""
    exploration_type: ExplorationType = ExplorationType.RANDOM
    episode_metrics: tuple[EpisodeMetric, ...] = ()
    post_processing: Mapping[str, Any] = field(default_factory=dict)
    """Post-processing by `collect`, as returned by `Collection.post_processing`; not applied to filled blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    num_frames: int
    version: PolicyVersion
    """Policy version of the frames, or RANDOM_VERSION if the policy is random."""
    episodes: Episodes
    """Episodes that ended in this batch."""
    moments: Statistics | None = None
    """Moments to merge into the job's statistics; None unless the manifest normalizes."""


class Collector:
    """Steps environments with a policy. Owned by one thread; other threads may use `gate` and `weights`."""

    def __init__(
        self,
        envs: Sequence[VectorEnv],
        actor: Actor,
        *,
        config: CollectorConfig,
        warmup: RandomActor,
        weights: StagedWeights,
        random_outputs: Callable[[Arrays], Arrays] | None = None,
    ) -> None:
        """Take environments of one kind, one EnvGroup each, and start their first episodes.

        Args:
            envs: one VectorEnv for each EnvGroup; their columns lie side by side in the batch.
            actor: chooses actions. The same object as `warmup` means random actions.
            warmup: chooses actions in the first `init_random_frames` frames.
            random_outputs: see `FirstFrames`.
        """
        self.gate = PauseGate()
        self.weights = weights
        self.frames: int = 0
        """Frames collected so far."""
        self.pulse: Array = np.zeros(1, dtype=np.int64)
        """Counts frames as they land, for a watcher in another process: [1] int64, replaced by shared memory."""
        self.timing: Timing = Timing()
        """Where this thread's time goes; replaced, as `pulse` is."""
        self.moments: BatchMoments | None = None
        """Set where the manifest normalizes."""
        self.statistics: StatisticsBook | None = None
        """Moments of the frames so far, where no fleet merges them; see `keep_statistics`."""
        self.on_landed: list[Callable[[EnvGroup], None]] = []
        """Called after each vector step, with the group that made it."""
        self.cpu: OneCpu = OneCpu()
        """Entered around a batch; pins threads if the environments have one."""
        self.actor: Actor = actor
        """Chooses actions after the random frames."""
        self.keeps_grad = False
        """It is called with gradients."""
        self.num_threads: int = 0
        """EnvPool threads of each EnvGroup; 0 without EnvPool."""
        self.warmup = warmup
        self.first_frames = FirstFrames(warmup, actor, weights, config.init_random_frames, random_outputs)
        self._config = config
        self._envs = tuple(envs)
        self._gone_restarts = 0
        """Restarts of environments that others took the place of."""
        self.spaces = same_spaces(self._envs)
        self.num_envs = sum(env.num_envs for env in envs)
        self.rng = TorchStream(config.seeds.seed_of("policy"), actor.device)
        metrics = EpisodeMetrics(config.episode_metrics, self._envs[0].info_leaves, self.num_envs)
        tasks = [config.variants.names[i] for i in config.variants.task_ids] if config.variants is not None else []
        self.trajectories = Trajectories(self.num_envs, trajectory_base(config.seeds), metrics, tasks=tasks)
        self._remote = actor if isinstance(actor, RemoteActor) else None
        if self._remote is not None:
            self._remote.while_waiting = self._look_at_gate
        self.is_first_batch: bool = True
        """The environments stand where `start` left them: there is nothing to reset yet."""
        self._was_cut_short: bool = False
        """The last batch raised: the environments went on, and nothing of it was kept."""
        self._start_env_groups()

    def _start_env_groups(self) -> None:
        check = ActionCheck(self.spaces[1])
        self.env_groups: list[EnvGroup] = []
        first = 0
        for env in self._envs:
            columns = slice(first, first + env.num_envs)
            kind = LockstepEnvGroup if env.lockstep else AsyncEnvGroup
            self.env_groups.append(
                kind(
                    env,
                    columns,
                    self.trajectories,
                    check,
                    random=self.warmup,
                    remote=self._remote,
                    max_frames=self._config.max_frames_per_trajectory,
                )
            )
            first = columns.stop
        self._rollout = None
        if len(self.env_groups) == 1 and not self._config.max_frames_per_trajectory:
            self._rollout = rollout_of(self._envs[0], self.env_groups[0], self.actor, check)
        for env_group in self.env_groups:
            env_group.start(self.actor.initial_states, self.layout(1))
        self.is_first_batch, self._was_cut_short = True, False

    def begin_anew(self, envs: Sequence[VectorEnv], *, seeds: WorkerPlace) -> None:
        """Continue with other environments of the same kind and new random streams, between two batches.

        Open trajectories end with their last batch, and new ones get new ids; surplus frames of asynchronous
        environments are dropped. Weights, the frame count and the rest of the warm-up stay.

        Args:
            envs: as many groups and columns as before. The caller has closed the old ones.

        Raises:
            EnvBuildError: they are not of the same kind.
        """
        same_spaces((*self._envs, *envs))
        self._gone_restarts = self.env_restarts
        self._envs = tuple(envs)
        self.rng = TorchStream(seeds.seed_of("policy"), self.actor.device)
        self.warmup.reseed(seeds.seed_of("actions"))
        self.trajectories.skip_to(seeds.first_trajectory)
        self.trajectories.open(slice(None))
        self._start_env_groups()

    @property
    def env_restarts(self) -> int:
        """Number of environments restarted so far after a crash or a hang."""
        return self._gone_restarts + sum(env.restarts for env in self._envs)

    def layout(self, num_rows: int) -> Layout:
        """Layout of a block for this collector, with T = `num_rows`."""
        return Layout(
            num_rows=num_rows,
            num_envs=self.num_envs,
            observation=leaves(self.spaces[0], ("observation",)),
            action=leaves(self.spaces[1], ("action",)),
            outputs=self.actor.outputs,
            states=self.actor.states,
            info=self._envs[0].info_leaves,
            task_names=self._config.variants.names if self._config.variants is not None else (),
            has_team_reward=self._config.has_team_reward,
        )

    def collect(
        self,
        *,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        device: torch.device | str | None = None,
    ) -> "TensorDict":
        """Collect exactly `num_steps` frames, or exactly `num_episodes` whole episodes, into memory of its own.

        Episodes are played from fresh starts, and each environment's share of them is fixed beforehand: short
        episodes are not favored. When `num_steps` is not a multiple of the number of environments, the columns have
        different lengths and the batch has a `("collector", "mask")`. After a call that raised, the next one begins
        new episodes.

        Args:
            num_steps: frames; give exactly one of num_steps and num_episodes.
            num_episodes: episodes.
            device: where the batch shall be; None: on the CPU. Frames that were made on that device stay there.

        Returns:
            TensorDict `[B, T]` with T = ceil(num_steps / B), or `[num_episodes, longest]`, padded and masked; see
            `batch.to_tensordict`. `multiStep` and `splitTrajectories` of the manifest are applied to it.

        Raises:
            ValueError: neither or both of num_steps and num_episodes.
            EnvError: an environment did not end its episodes within 10,000,000 frames.
        """
        # Worker processes hand over blocks and never get here: importing tensordict takes seconds.
        from cormorant_postproc import split_trajectories
        from cormorant_worker.collect.batch import to_tensordict, with_mask

        asked = num_episodes if num_steps is None else num_steps
        if None not in (num_steps, num_episodes) or not (isinstance(asked, int | np.integer) and asked > 0):
            raise ValueError(
                f"num_steps {num_steps!r} and num_episodes {num_episodes!r}: give exactly one of them, 1 or more"
            )
        if num_steps is None:
            assert num_episodes is not None
            self.restart()
            blocks = self.play_episodes(num_episodes)
            played: TensorDict = torch.cat([with_mask(to_tensordict(block, copy=True)) for block in blocks], dim=1)
            lost = torch.tensor(sorted(self.trajectories.lost), dtype=torch.int64)
            played["collector", "mask"] &= ~torch.isin(played["collector", "traj_ids"], lost)
            batch = split_trajectories(played)
        else:
            block = Block(self.layout(-(-num_steps // self.num_envs)))
            self.fill(block, num_steps)
            there = None if self._rollout is None else self._rollout.rows_of(block, device)
            batch = to_tensordict(block, copy=there is not None, rows_there=there)
        if device is not None:
            batch = batch.to(device)
        if not self._config.post_processing:
            return batch
        from cormorant_postproc.steps import of_collection

        return of_collection(self._config.post_processing)(batch)

    def fill(self, block: Block, num_frames: int) -> Filled:
        """Collect exactly `num_frames` frames into a block, with the newest weights that were offered; fewer, and at
        least one, when the gate is sealed meanwhile.

        Raises:
            InvalidAction: the policy's actions cannot be sent.
            EnvCrashed: the environments failed and cannot continue.
            Stopped: the gate was stopped.
        """
        self.trajectories.lost.clear()
        rows, rest = divmod(num_frames, self.num_envs)
        quota = np.full(self.num_envs, rows, dtype=np.int64)
        quota[:rest] += 1
        if not self._config.reset_at_each_batch:
            return self.fill_columns(block, quota)
        if not self.is_first_batch:
            self.restart()
        filled = self.fill_columns(block, quota)
        last = block.runs.last_rows, block.runs.filled
        block.truncated[last] |= ~block.terminated[last]
        block.end_agents()
        return filled

    def fill_columns(self, block: Block, quota: Array) -> Filled:
        """Collect `quota` [B] frames of each environment into a block, ignoring `resetAtEachBatch`; fewer when the gate
        is sealed meanwhile. If the last batch raised, it begins new episodes. Raises the errors of `fill`.
        """
        if self._was_cut_short:
            self.restart()
        block.begin(int(quota.max()))
        if self._config.variants is not None:
            block.tasks[0][: block.num_rows] = self._config.variants.task_ids
        block.lengths[:] = quota
        self.is_first_batch = False
        left = self.first_frames.left
        with self.cpu:
            version = self.weights.apply() if self.actor is not self.warmup else RANDOM_VERSION
            with self.rng, torch.set_grad_enabled(self.keeps_grad), exploring(self._config.exploration_type):
                self.timing.begin()
                if self.gate.is_closed:
                    self._hold()
                self._was_cut_short = True
                is_even = not (self.on_landed or self.first_frames.left or (quota != quota[0]).any())
                rollout = self._rollout if is_even else None
                if rollout is None or not rollout.fill(block, int(quota[0]), version, self.timing, self._proceed):
                    self._run_env_groups(block, quota, version)
                self._was_cut_short = False
                self.timing.rest(IDLE)
        # A sealed batch has fewer rows than it was to have, and not as many in every column.
        block.lengths[:] = np.concatenate([env_group.quota for env_group in self.env_groups])
        block.num_rows = int(block.lengths.max())
        block.end_agents()
        if left > 0 and all(env.lockstep for env in self._envs):
            # Actions of environments that crashed in their step made no frames.
            self.first_frames.left = max(0, left - int((block.versions == RANDOM_VERSION).sum()))
        num_frames = block.num_frames
        self.frames += num_frames
        episodes = self.trajectories.episodes_of(block)
        moments = None if self.moments is None else self.moments.of(block)
        if self.statistics is not None and moments is not None:
            self.statistics.merge(moments)
        return Filled(num_frames=num_frames, version=version, episodes=episodes, moments=moments)

    def play_episodes(self, num_episodes: int) -> Iterator[Block]:
        """Play exactly `num_episodes` whole episodes, without favoring short ones. All blocks use the same memory.

        Stopping as soon as n episodes have ended would favor short ones. Instead every environment has a share (n // B,
        the first n % B environments one more) and stops after the last episode of it. An episode in which the
        environment crashed does not count.

        Args:
            num_episodes: number of episodes over all environments.

        Yields:
            A complete block, valid until the next one.

        Raises:
            EnvError: an environment did not end its episodes within 10,000,000 frames.
        """
        ids, lost = self.trajectories.ids, self.trajectories.lost
        lost.clear()
        share = np.full(self.num_envs, num_episodes // self.num_envs, dtype=np.int64)
        share[: num_episodes % self.num_envs] += 1
        left, missing, before, frames = share.copy(), share.copy(), ids.copy(), np.zeros_like(share)

        def stop_ended(env_group: EnvGroup) -> None:
            ended = np.flatnonzero(before != ids)
            if not len(ended):
                return
            episodes = ended[~np.isin(before[ended], list(lost))]
            before[ended] = ids[ended]
            missing[episodes] -= 1
            if len(done := episodes[missing[episodes] == 0]):
                env_group.stop(done - env_group.columns.start)

        block = Block(self.layout(_EPISODE_ROWS))
        while (left > 0).any():
            for late in np.flatnonzero((left > 0) & (frames >= _LONGEST_SHARE)):
                raise EnvError(
                    f"environment {late} has ended {share[late] - left[late]} of {share[late]} episodes in "
                    f"{_LONGEST_SHARE:,} frames; set spec.env.maxEpisodeSteps"
                )
            quota = np.where(left > 0, np.minimum(_EPISODE_ROWS, _LONGEST_SHARE - frames), 0)
            missing[:], before[:] = left, ids
            for env_group in self.env_groups:
                # Episodes of asynchronous environments may have ended ahead of what was handed over.
                for column, length in env_group.ends_ahead():
                    missing[at := env_group.columns.start + column] -= 1
                    if missing[at] == 0:
                        quota[at] = min(quota[at], length)
            self.on_landed.append(stop_ended)
            try:
                self.fill_columns(block, quota)
            finally:
                self.on_landed.remove(stop_ended)
            rows, columns = block.end_rows[: block.num_ends], block.end_columns[: block.num_ends]
            np.subtract.at(left, columns[~np.isin(block.traj_ids[rows, columns], list(lost))], 1)
            frames += block.lengths
            yield block

    def restart(self) -> None:
        """Begin new episodes everywhere; open trajectories end with the last batch."""
        for env_group in self.env_groups:
            env_group.restart()
        self._was_cut_short = False

    def _proceed(self, num_frames: int) -> bool:
        self.pulse[0] += num_frames
        if not self.gate.is_closed:
            return True
        self._hold()
        return not self.gate.is_sealed

    def _run_env_groups(self, block: Block, quota: Array, version: PolicyVersion) -> None:
        gate, pulse, timing, on_landed = self.gate, self.pulse, self.timing, self.on_landed
        busy = []
        for env_group in self.env_groups:
            env_group.begin(block, quota[env_group.columns])
            if env_group.is_done:
                env_group.finish()
            else:
                self._act(env_group, version)
                busy.append(env_group)
        while busy:
            for env_group in tuple(busy):
                laps = env_group.laps = timing.next_laps()
                pulse[0] += env_group.land()
                for tell in on_landed:
                    tell(env_group)
                if gate.is_closed:
                    laps = env_group.laps = None
                    self._hold()
                    # Frames beyond a column's quota are no frames of this batch.
                    if gate.is_sealed and np.minimum(env_group.landed, env_group.quota).any():
                        env_group.stop(slice(None))
                if env_group.is_done:
                    env_group.finish()
                    busy.remove(env_group)
                else:
                    self._act(env_group, version)
                if laps is not None:
                    env_group.laps = None
                    timing.measured(laps)

    def _hold(self) -> None:
        self.timing.rest(PAUSED)
        self.gate.wait_while_paused()
        self.timing.begin()

    def _look_at_gate(self) -> None:
        self.timing.begin()  # the fleet sees that this thread lives
        if self.gate.is_closed:
            self._hold()

    def _act(self, env_group: EnvGroup, version: PolicyVersion) -> None:
        if self.first_frames.left > 0:
            env_group.act(self.first_frames, RANDOM_VERSION)
        else:
            env_group.act(self.actor, version)

    def look(self, column: int, leaf: int) -> Array:
        """A copy of one leaf (by its index in `leaves` of the observation space) of an environment's observation. May
        be called from any thread; see `EnvGroup.look`. Raises IndexError where there is no such environment or leaf.
        """
        for env_group in self.env_groups:
            if column < env_group.columns.stop:
                return env_group.look(column - env_group.columns.start, leaf)
        raise IndexError(f"environment {column} of {self.num_envs}")

    def keep_statistics(self) -> None:
        """For a collector without a fleet: with `normalize`, add frames to the statistics as they are collected, and
        assign offered weights the statistics of that moment.
        """
        if self.moments is not None:
            self.statistics = StatisticsBook()
            self.statistics.begin(self.moments.initial)
            self.weights.stamp = self.statistics.stamp

    def state(self) -> bytes:
        """Everything that is needed to continue from this batch boundary."""
        if self._was_cut_short:
            self.restart()
        arrays: dict[str, Array] = {"torch_rng": self.rng.state.numpy()}
        if self.rng.cuda_state is not None:
            arrays["cuda_rng"] = self.rng.cuda_state.numpy()
        arrays |= {f"trajectories.{name}": value for name, value in self.trajectories.state().items()}
        if self.moments is not None:
            arrays["discounted_returns"] = self.moments.open_returns.of(self.trajectories.ids)
        why_not = ""
        try:
            for i, group in enumerate(self.env_groups):
                arrays |= {f"lane.{i}.{name}": value for name, value in group.state().items()}
        except EnvNotSaved as error:
            why_not = str(error)
        metadata = {
            "format": FORMAT,
            "num_envs": self.num_envs,
            "layout": self.layout(1).description,
            "frames": self.frames,
            "warmup_left": self.first_frames.left,
            "is_first_batch": self.is_first_batch,
            "version": self.weights.version,
            "envs_saved": not why_not,
            "why_not": why_not,
            "action_rng": self.warmup.state(),
        }
        if self.statistics is not None and self.weights.normalizer is not None:
            metadata["statistics"] = {
                "current": self.statistics.current.document(),
                "acting": self.weights.normalizer.statistics.document(),
                "versions": dict(self.statistics),
            }
        flat = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
        data: bytes = safetensors.numpy.save(flat, metadata={"cormorant": json.dumps(metadata)})
        return data

    def restore(self, state: bytes, *, first_trajectory: int = 0, rewinds: bool = True) -> None:
        """Continue from a `state()` of an equal collector, between two batches. If the state does not fit,
        nothing is changed.

        Where environments can be saved (gymnasium environments with `get_state` and `set_state`), the frames that
        follow are bit-identical except for trajectory ids. No id is used twice: open trajectories continue under new
        ids unless nothing was collected here since. Other environments, such as EnvPool's, begin new episodes.

        Args:
            first_trajectory: for fleets: first of the new ids under which open trajectories continue; 0: they keep
                the saved ids if nothing was collected here since.
            rewinds: False leaves environments and random streams as they are and restores only counts and statistics.

        Raises:
            StateError: not a state, or one of a collector with other environments, spaces or policy outputs; or an
                environment refused its state, and all environments have begun new episodes.
        """
        metadata = read_metadata(state)  # which has compared the arrays' places with the size
        arrays = safetensors.numpy.load(state)
        for name, ours in (("num_envs", self.num_envs), ("layout", self.layout(1).description)):
            if metadata[name] != ours:
                raise StateError(
                    f"the state's {name} is {metadata[name]}, this collector's is {ours}; use the same job"
                )
        groups = [value.size for name, value in sorted(arrays.items()) if re.fullmatch(r"lane\.\d\.is_init", name)]
        if metadata["envs_saved"] and groups != (own := [group.env.num_envs for group in self.env_groups]):
            raise StateError(
                f"the state's environments step in groups of {groups}, this collector's in groups of {own}: only "
                "one of both has inference servers; use the same worker groups"
            )
        if rewinds:
            self._rewind(metadata, arrays, first_trajectory=first_trajectory)
        if (book := self.statistics) is not None and "statistics" in metadata:
            # The saved statistics act from now on, whatever the version of the weights is called here, until newer
            # weights are offered. Weights that are offered again under a saved version get that version's statistics.
            saved = metadata["statistics"]
            versions = {int(version): Statistics.of_document(of) for version, of in saved["versions"].items()}
            book.reset(Statistics.of_document(saved["current"]), versions)
            acting = Statistics.of_document(saved["acting"])
            if self.weights.normalizer is not None:
                self.weights.normalizer.use(acting)
            book.stamp(self.weights.version, acting)
        self.frames, self.first_frames.left = metadata["frames"], metadata["warmup_left"]

    def _rewind(self, metadata: dict[str, Any], arrays: dict[str, Array], *, first_trajectory: int) -> None:
        trajectories, saved = self.trajectories, under(arrays, "trajectories.")
        has_envs = metadata["envs_saved"]
        keeps_ids = has_envs and not first_trajectory and (not self.pulse[0] or trajectories.is_at(saved))
        if has_envs:
            try:
                for i, env_group in enumerate(self.env_groups):
                    env_group.restore(under(arrays, f"lane.{i}."))
            except BaseException:
                # Some of the environments may have gone back and others not.
                for env_group in self.env_groups:
                    env_group.restart()
                raise
        self.rng.state = torch.from_numpy(arrays["torch_rng"].copy())
        if self.rng.cuda_state is not None and "cuda_rng" in arrays:
            self.rng.cuda_state = torch.from_numpy(arrays["cuda_rng"].copy())
        trajectories.skip_to(first_trajectory)
        trajectories.restore(saved, keeps_ids=keeps_ids)
        if self.moments is not None and "discounted_returns" in arrays:
            self.moments.open_returns.go_on(trajectories.ids, arrays["discounted_returns"])
        self.warmup.restore(metadata["action_rng"])
        self.is_first_batch, self._was_cut_short = metadata["is_first_batch"], self._was_cut_short and not has_envs
        if not has_envs:
            for env_group in self.env_groups:
                env_group.restart()

    def close(self) -> None:
        """Close the environments. May be called twice."""
        for env in self._envs:
            env.close()

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
