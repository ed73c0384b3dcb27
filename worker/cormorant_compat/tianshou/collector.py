"""Collector and AsyncCollector with Tianshou's arguments, methods and attributes, stepping as this project steps.

    collect(n_step | n_episode):  requests are checked -> groups fill blocks -> tally -> transforms, hooks -> buffer

# B environments, T steps
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from cormorant_compat.arguments import Buffer, Environments, Policy, as_count
from cormorant_compat.tianshou.buffers import as_store, usual_buffer
from cormorant_compat.tianshou.envs import as_vector_env, refuse_reset_kwargs, resetting_with
from cormorant_compat.tianshou.hooks import EpisodeHook, Hooks, StepHook
from cormorant_compat.tianshou.policies import DECIDED, batch_class, evaluating, is_tianshou_policy, make_actor
from cormorant_compat.tianshou.stats import CollectStats
from cormorant_postproc.pieces import blanked
from cormorant_worker.collect import collector as engine
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.env_group import EnvGroup
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.trajectories import EpisodeTally
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.errors import EnvError
from cormorant_worker.policy.exploration import ExplorationType
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Space
from cormorant_worker.weights.staged import StagedWeights

if TYPE_CHECKING:
    from tensordict import TensorDict

Transform = Callable[[Any], Any]

Stats = TypeVar("Stats", bound=CollectStats)
"""`Collector[CollectStats](...)`, as Tianshou's scripts write it."""

_BLOCK_BYTES = 256 << 20
_NEVER = 1 << 62


class Collector(Generic[Stats]):
    """Steps environments with a policy and stores the transitions, like Tianshou's Collector.

    Counts are exact, short episodes are not favored, hidden states are reset at ends of episodes. The constructor
    resets the environments, so `reset` need not be called first.
    """

    _takes_stragglers = False
    """Environments may return as they become ready, in any order."""

    def __init__(
        self,
        policy: "Policy | None",
        env: "Environments",
        buffer: "Buffer | None" = None,
        exploration_noise: bool = False,
        on_episode_done_hook: EpisodeHook | None = None,
        on_step_hook: StepHook | None = None,
        *,
        transforms: Sequence[Transform] = (),
        exploration_type: str = "random",
        seed: int = -1,
        info: Sequence[str | Mapping[str, Any]] = (),
    ) -> None:
        """Take a policy, environments and a buffer, and start the first episodes. Beyond what Tianshou's takes:

        Args:
            policy: an Algorithm, a torch module, a TensorDictModule, a callable, a mapping of modules with "policy";
                None = random actions. Modules are in evaluation mode while they collect, and are put back into their
                own mode afterwards. They are not moved or copied.
            env: a list of environments or of functions that make them, an EnvPool, a vector environment of gymnasium.
            buffer: TorchRL's replay buffers, `LatestBatch()`, anything with `extend(TensorDict)`. None = Tianshou's
                usual buffer, of the newest frames; where Tianshou is not imported, nothing is stored.
            on_episode_done_hook: see `hooks.py`, as for on_step_hook.
            transforms: functions from batch `[B, T]` to batch, applied before storing: `cormorant_postproc`'s.
            exploration_type: "random", "mode", "mean" or "deterministic", for policies that ask for it.
            seed: seed of random actions, of the policy's sampling, and of environments that are given ready-made; -1
                = drawn from torch's generator, so that `torch.manual_seed` fixes it.
            info: keys of the environments' info to store with every frame, or items of `spec.env.info`.

        Raises:
            ValueError: the buffer does not fit the environments, or an argument is refused.
            EnvError, PolicyError: the environments or the policy cannot be used; says why.
        """
        # Where Tianshou 2 was imported, `isinstance(collector, BaseCollector)` is true.
        if base := getattr(sys.modules.get("tianshou.data.collector"), "BaseCollector", None):
            base.register(Collector)
        inner = getattr(policy, "policy", None)  # of an Algorithm
        self.policy = inner if is_tianshou_policy(inner) else policy
        self.env = env
        self.exploration_noise = exploration_noise
        self.collect_step, self.collect_episode, self.collect_time = 0, 0, 0.0
        self.is_closed = False
        self._transforms = tuple(transforms)
        self._seed = int(torch.randint(1 << 62, (1,))) if seed < 0 else seed
        self._attempt = 0
        self._was_cut_short = False
        """The last call raised after it had begun to step."""
        self._envs: VectorEnv = as_vector_env(env, self._seeds().env_seeds, info)
        self._is_usual_buffer = buffer is None
        try:
            self.buffer = usual_buffer(self._envs.num_envs) if buffer is None else buffer
            self._store = None if self.buffer is None else as_store(self.buffer)
            if not (self._envs.lockstep or self._takes_stragglers):
                raise EnvError(  # noqa: TRY301  # the environments are closed below
                    f"the environments come back {self._envs.min_in_flight} at a time of {self._envs.num_envs}; use "
                    "AsyncCollector"
                )
            self._refuse_room()
            observation, action = self._envs.observation_space, self._envs.action_space
            random = RandomActor(action, self._seeds().seed_of("actions"), observation=observation)
            with evaluating(self.policy):
                actor, random_outputs = make_actor(
                    self.policy,
                    observation,
                    action,
                    random,
                    exploration_noise=exploration_noise,
                    num_rows=self._envs.num_envs if self._envs.lockstep else self._envs.min_in_flight,
                )
            self._engine = engine.Collector(
                [self._envs],
                actor,
                config=engine.CollectorConfig(seeds=self._seeds(), exploration_type=ExplorationType(exploration_type)),
                warmup=random,
                weights=StagedWeights({}),
                random_outputs=random_outputs,
            )
        except BaseException:
            self._envs.close()
            raise
        is_theirs = is_tianshou_policy(self.policy) or hasattr(self.buffer, "_meta")
        self._hooks = Hooks(on_step_hook, on_episode_done_hook, batch_class=batch_class() if is_theirs else None)
        self._forget()
        self._blocks: dict[int, Block] = {}

    # -- what Tianshou's has -----------------------------------------------------------------------------------

    @property
    def env_num(self) -> int:
        return self._envs.num_envs

    @property
    def action_space(self) -> Space:
        return self._envs.action_space

    def collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        no_grad: bool = True,
        reset_before_collect: bool = False,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> CollectStats:
        """Collect exactly `n_step` frames, or exactly `n_episode` whole episodes, and store them. After a call that
        raised while it stepped, the next one begins new episodes.

        Args:
            n_step: frames over all environments. If this is not a multiple of the number of environments, the first
                ones take one more step. Open episodes continue in the next call.
            n_episode: episodes. Each environment's share is fixed beforehand and played from fresh starts; with fewer
                episodes than environments, the first environments play one each.
            random, render, no_grad, reset_before_collect: as in Tianshou. Stored values are always detached.
            gym_reset_kwargs: for resets in this call; `seed` with `reset_before_collect` only, for that reset alone,
                spread over the environments.

        Raises:
            ValueError: both or neither of n_step and n_episode, a number out of range, a buffer that is too small, a
                seed without reset_before_collect: before anything is stepped.
            EnvError: the environments take no reset arguments, cannot be rendered, or do not end their episodes.
        """
        if self.is_closed:
            raise ValueError("the collector is closed; make another one")
        if (n_step is None) == (n_episode is None):
            raise ValueError(f"n_step {n_step} and n_episode {n_episode}: give exactly one of them, 1 or more")
        num_steps = 0 if n_step is None else as_count(n_step, "n_step")
        num_episodes = 0 if n_episode is None else as_count(n_episode, "n_episode")
        kwargs = dict(gym_reset_kwargs or {})
        refuse_reset_kwargs(self._envs, kwargs)
        if "seed" in kwargs and not reset_before_collect:
            raise ValueError(
                f"gym_reset_kwargs has seed {kwargs['seed']} and nothing is reset when collecting begins; add "
                "reset_before_collect=True, or call reset_env with them once"
            )
        if render and not hasattr(self._envs, "render"):
            raise EnvError(f"{type(self._envs).__name__} cannot be rendered; leave render out")
        self._refuse_room(num_steps=num_steps, num_episodes=num_episodes)
        if reset_before_collect:
            self.reset(reset_buffer=False, gym_reset_kwargs=kwargs)
        elif self._was_cut_short:
            self.reset_env(kwargs)
        kwargs.pop("seed", None)
        began = time.perf_counter()
        self._was_cut_short = True
        self._engine.keeps_grad = not no_grad
        self._engine.first_frames.left = _NEVER if random or self.policy is None else 0
        with evaluating(self.policy), resetting_with(self._envs, kwargs), self._rendering(render):
            stats = self._steps(num_steps) if num_steps else self._episodes(num_episodes)
        self._was_cut_short = False
        stats.collect_time = max(time.perf_counter() - began, 1e-9)
        stats.collect_speed = stats.n_collected_steps / stats.collect_time
        self.collect_step += stats.n_collected_steps
        self.collect_episode += stats.n_collected_episodes
        self.collect_time += stats.collect_time
        return stats

    def reset(
        self, reset_buffer: bool = True, reset_stats: bool = True, gym_reset_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.reset_env(gym_reset_kwargs)
        if reset_buffer:
            self.reset_buffer()
        if reset_stats:
            self.reset_stat()

    def reset_stat(self) -> None:
        self.collect_step, self.collect_episode, self.collect_time = 0, 0, 0.0

    def reset_buffer(self, keep_statistics: bool = False) -> None:
        """Empty the buffer. `keep_statistics` is passed to `reset` of Tianshou's buffers."""
        if self._store is not None:
            self._store.reset(keep_statistics=keep_statistics)

    def reset_env(self, gym_reset_kwargs: dict[str, Any] | None = None) -> None:
        """Begin new episodes everywhere; hidden states are reset with them. Each environment gets its own seed, derived
        from the `seed` of `gym_reset_kwargs`.
        """
        kwargs = dict(gym_reset_kwargs or {})
        refuse_reset_kwargs(self._envs, kwargs)
        seed = kwargs.pop("seed", None)
        if seed is not None:
            self._seed, self._attempt = int(seed), 0
            self._envs.seed(self._seeds().env_seeds(self.env_num))  # type: ignore[attr-defined]  # has reset_with
        with resetting_with(self._envs, kwargs):
            if seed is not None or not self._envs.lockstep:
                self._attempt += seed is None
                self._engine.begin_anew([self._envs], seeds=self._seeds())
            else:
                self._engine.restart()
        self._was_cut_short = False
        self._forget()

    def set_on_step_hook(self, hook: StepHook | None) -> None:
        self._hooks.on_step = hook

    def set_on_episode_done_hook(self, hook: EpisodeHook | None) -> None:
        """Replace the hook. A hook that is set during an episode sees only the rest of that episode."""
        self._hooks.on_episode = hook

    def close(self) -> None:
        """Close the environments. May be called twice."""
        self._envs.close()
        self.is_closed = True

    def __enter__(self) -> "Collector[Stats]":
        """Use as a context manager to close the environments."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- collecting --------------------------------------------------------------------------------------------

    def _steps(self, n_step: int) -> CollectStats:
        most = _NEVER
        if not getattr(self.buffer, "keeps_time", False):
            # Long requests are collected and stored in several blocks.
            one = self._engine.layout(1)
            frame = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in (*one.observation, *one.states))
            most = max(1, _BLOCK_BYTES // (max(frame, 64) * self.env_num)) * self.env_num
        ended, steps, left = [], 0, n_step
        while left:
            count = min(left, most)
            if (rows := -(-count // self.env_num)) not in self._blocks:
                # One block, of this size: what a batch holds is copied into the buffer before the next one.
                self._blocks = {rows: Block(self._engine.layout(rows))}
            block = self._blocks[rows]
            self._engine.fill(block, count)
            ended.append(self._count(block))
            steps += int(block.lengths.sum())
            if self._wants_batches:
                self._deliver(self._batch(block), block.lengths, may_store=False)
            left -= count
        return _stats_of(ended, steps)

    def _episodes(self, n_episode: int) -> CollectStats:
        if self._is_open.any():
            self._engine.restart()
            self._forget()
        made, steps = [], 0
        chunks: list[tuple[TensorDict, Array]] = []
        for block in self._engine.play_episodes(n_episode):
            made.append(self._count(block))
            steps += int(block.lengths.sum())
            if self._wants_batches:
                chunks.append((self._batch(block, copy=True), block.lengths.copy()))
                if self._is_usual_buffer and not self._transforms and self._hooks.are_none:
                    # Nobody needs whole episodes: what this buffer drops is not kept until the end.
                    self._deliver(*_join(chunks), may_store=False)
                    chunks.clear()
        if chunks:
            self._deliver(*_join(chunks), may_store=True)
        return _stats_of(made, steps)

    def _forget(self) -> None:
        self._tally = EpisodeTally(self.env_num)
        self._is_open: Array = np.zeros(self.env_num, dtype=np.bool_)
        """[B] bool: the environment's next frame goes on with an episode whose beginning was handed over."""
        self._hooks.forget()

    def _count(self, block: Block) -> tuple[Array, Array, Array]:
        """Column, return and length of each episode that ended in a batch, by column, then time."""
        last = block.runs.last_rows, block.runs.filled
        self._is_open[block.runs.filled] = ~(block.terminated[last] | block.truncated[last])
        rows, columns, returns, lengths = self._tally.take(block, self._engine.trajectories.lost)
        order = np.lexsort((rows, columns))
        return columns[order], returns[order], lengths[order]

    @property
    def _wants_batches(self) -> bool:
        return self._store is not None or not self._hooks.are_none

    def _batch(self, block: Block, *, copy: bool = False) -> "TensorDict":
        from cormorant_worker.collect.batch import to_tensordict

        batch = to_tensordict(block, copy=copy)
        if DECIDED in batch.keys(True) or DECIDED[0] in batch:
            # A learner trains what the policy decided; the environments saw what `map_action` made of it.
            batch["env_action"] = batch["action"]
            batch["action"] = batch.pop(DECIDED[0])
        return batch

    def _deliver(self, batch: "TensorDict", lengths: Array, *, may_store: bool) -> None:
        if not self._hooks.are_none:
            self._hooks.see(batch, lengths, may_store=may_store)
        for transform in self._transforms:
            batch = transform(batch)
        if self._store is not None:
            self._store.take(batch, lengths)

    @contextmanager
    def _rendering(self, seconds: float | None) -> Iterator[None]:
        if not seconds:
            yield
            return

        def show(_: EnvGroup) -> None:
            self._envs.render()  # type: ignore[attr-defined]  # checked by collect
            time.sleep(seconds)

        self._engine.on_landed.append(show)
        try:
            yield
        finally:
            self._engine.on_landed.remove(show)

    def _seeds(self) -> WorkerPlace:
        return WorkerPlace(seed=self._seed, attempt=self._attempt)

    def _refuse_room(self, *, num_steps: int = 0, num_episodes: int = 0) -> None:
        if self._store is None or self._is_usual_buffer:
            return
        room, count = self._store.room(self.env_num), max(num_steps, num_episodes)
        if room is not None and count > room:
            raise ValueError(
                f"the buffer holds {room:,} frames of {self.env_num} environments, and "
                f"{'n_step' if num_steps else 'n_episode'} {count:,} brings at least {count:,}: the first ones would "
                "be overwritten before they are read; make it larger, or collect less at once"
            )


class AsyncCollector(Collector[CollectStats]):
    """A `Collector` for environments that return as they become ready: EnvPool with `batch_size < num_envs`.

    Counts are exact here, too: surplus frames of faster environments are kept for the next request.
    """

    _takes_stragglers = True


def _stats_of(ended: Sequence[tuple[Array, Array, Array]], steps: int) -> CollectStats:
    columns, returns, lengths = (np.concatenate(same) for same in zip(*ended, strict=True))
    order = np.argsort(columns, kind="stable")
    return CollectStats.with_autogenerated_stats(
        returns[order], lengths[order], n_collected_episodes=len(returns), n_collected_steps=steps
    )


def _join(chunks: Sequence[tuple["TensorDict", Array]]) -> tuple["TensorDict", Array]:
    """Chunks `[B, T]` in a row: `[B, longest]`, padded and masked. Only a column whose share has ended falls short."""
    lengths = np.sum([lengths for _, lengths in chunks], axis=0)
    longest = int(lengths.max(initial=0))
    whole: TensorDict = torch.cat([chunk.exclude(("collector", "mask")) for chunk, _ in chunks], dim=1)[:, :longest]
    mask = torch.from_numpy(np.arange(longest) < lengths[:, None])
    if not bool(mask.all()):
        whole = blanked(whole, ~mask)
        whole["collector", "mask"] = mask
    whole.names = [None, "time"]
    return whole, lengths
