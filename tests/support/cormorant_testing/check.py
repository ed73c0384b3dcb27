"""Compares every value of every batch of a CountingEnv job with what it must be, in the order of delivery.

A trajectory id says which worker attempt collected a frame; its seed, and with it every value, follows:

    checker = Checker(job_seed=7, num_envs=3, options={"lengths": (2, 3)})
    for batch in LocalFleet(fleet).batches():
        checker.take(batch)
    assert checker.frames == 10_000
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cormorant_testing.envs import ACTION_SPACES, IDENT_MODULUS, OBSERVATION_SPACES, Oracle
from cormorant_worker.collect.seeding import SeedPath
from cormorant_worker.spaces import Array, Arrays, flatten, leaves, unflattener

Attempt = tuple[int, int, int, int]
"""(group number, slot index, attempt, epoch)."""

COUNT = "count"
"""The recurrent state of `cormorant_testing.policies:counter`: frames since the trajectory began."""


def attempt_of(traj_id: int) -> Attempt:
    """The worker attempt in the upper bits of a trajectory id."""
    upper = traj_id >> 34
    return upper >> 26, upper >> 12 & 0x3FFF, (traj_id & (1 << 34) - 1) >> 24, upper & 0xFFF


def restarted_seed(seed: int) -> int:
    """The seed that a crashed environment is restarted with."""
    return int(np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1)[0] >> 1)


@dataclass
class Stream:
    """One environment of one worker attempt: what its next frame must be."""

    seed: int
    episode: int = 0
    step: int = 0
    """Steps of the episode so far."""
    obs: Arrays = ()
    traj_id: int = -1
    """-1: the next frame begins a trajectory."""
    length: int = 0
    """Frames of the open trajectory so far."""
    count: int = 0
    version: int = -1
    restarts: int = 0


@dataclass
class Checker:
    """Takes batches; raises AssertionError at the first wrong value, naming where it is."""

    job_seed: int
    num_envs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the CountingEnv."""
    action: str = "discrete"
    num_groups: int = 1
    max_frames: int = 0
    """maxFramesPerTrajectory."""
    resets: bool = False
    """resetAtEachBatch."""
    crashes: bool = False
    """Environments may be restarted: truncated at their last stored frame, then another seed."""
    gaps: bool = False
    """Batches may be missing (drop_oldest, staleness): streams go on later than where they were, never before."""
    acts_by_version: bool = False
    """The policy is `versioned`: the first number of each action is the version of the weights that chose it."""
    versions: bool = True
    """False: all frames are random ones, of version -1."""
    frames: int = 0
    batches: int = 0

    def __post_init__(self) -> None:
        known = {k: v for k, v in self.options.items() if k in {"lengths", "longest", "ends", "observation"}}
        if isinstance(known.get("lengths"), int):
            known["lengths"] = (known["lengths"],)
        self._known = known
        self._observation_space = OBSERVATION_SPACES[known.get("observation", "box")]
        self._action_space = ACTION_SPACES[self.action]
        self.streams: dict[tuple[Attempt, int], Stream] = {}
        self.used_ids: set[int] = set()
        self.ended: list[int] = []
        """Lengths of the episodes that ended, as the stream shows them."""

    @property
    def attempts(self) -> set[tuple[int, int, int]]:
        """Worker attempts that have delivered frames, of any epoch."""
        return {attempt[:3] for attempt, _ in self.streams}

    @property
    def restarts(self) -> int:
        """Environments that were seen to be restarted."""
        return sum(stream.restarts for stream in self.streams.values())

    def take(self, batch: Any) -> int:
        """Check one batch `[B, T]` or `[W*B, T]`. Returns its number of frames."""
        rows, steps = batch.shape
        assert rows % self.num_envs == 0, batch.shape
        assert batch.names[-1] == "time"
        lengths = [steps] * rows
        if ("collector", "mask") in batch.keys(True):
            mask = batch["collector", "mask"].numpy()
            lengths = [int(n) for n in mask.sum(1)]
            np.testing.assert_array_equal(mask, np.arange(steps)[None, :] < np.array(lengths)[:, None])
        values = _Values(batch, self._observation_space, self._action_space)
        for first in range(0, rows, self.num_envs):
            self._take_worker(values, first, lengths[first : first + self.num_envs])
        if rows > self.num_envs:
            heads = values.traj_ids[:: self.num_envs, 0]
            workers = [attempt_of(int(head))[:2] for head in heads]
            assert workers == sorted(set(workers)), f"parts are not in the order of places: {workers}"
        for row, length in enumerate(lengths):
            for array in values.without_states:
                assert not array[row, length:].any(), f"padding of row {row}"
        self.batches += 1
        found = int(sum(lengths))
        self.frames += found
        return found

    def _take_worker(self, values: "_Values", first: int, lengths: list[int]) -> None:
        stepped = [first + column for column, length in enumerate(lengths) if length]
        if not stepped:
            return
        attempt = attempt_of(int(values.traj_ids[stepped[0], 0]))
        for column, length in enumerate(lengths):
            stream = self.streams.get((attempt, column))
            if stream is None:
                group, index, number, epoch = attempt
                path = SeedPath(
                    seed=self.job_seed,
                    index=index,
                    attempt=number,
                    epoch=epoch,
                    group_number=group,
                    num_groups=self.num_groups,
                )
                stream = self.streams[attempt, column] = Stream(seed=path.env_seeds(self.num_envs)[column])
                stream.obs = self._flat(self._oracle(stream).obs(0, 0))
            for t in range(length):
                where = f"batch {self.batches}, row {first + column}, step {t}, worker {attempt}, column {column}"
                self._frame(values, first + column, t, length, stream, attempt, where)

    def _frame(
        self, values: "_Values", row: int, t: int, length: int, stream: Stream, attempt: Attempt, where: str
    ) -> None:
        self._check_id(values, row, t, stream, attempt, where)
        _same(values.obs(row, t), stream.obs, f"observation at {where}")
        self._check_version(values, row, t, stream, where)
        self._check_count(values, row, t, stream, where)

        action = values.action(row, t)
        stream.step += 1
        stream.length += 1
        oracle = self._oracle(stream)
        moment = oracle.moment(stream.episode, stream.step, action)
        reached = self._flat(oracle.obs(stream.episode, stream.step, action))
        _same(values.next_obs(row, t), reached, f"next observation at {where}")
        assert values.reward[row, t] == np.float32(moment.reward), f"reward at {where}: {values.reward[row, t]}"
        flags = bool(values.terminated[row, t]), bool(values.truncated[row, t])
        assert bool(values.done[row, t]) == any(flags), f"done at {where}"

        is_over = moment.terminated or moment.truncated
        is_cut = not is_over and self.max_frames == stream.length
        is_reset = not is_over and not is_cut and self.resets and t == length - 1
        expected = (moment.terminated, moment.truncated or is_cut or is_reset)
        has_crashed = self.crashes and flags == (False, True) and expected == (False, False)
        assert has_crashed or flags == expected, f"(terminated, truncated) at {where}: {flags}, not {expected}"
        if is_over or is_cut or is_reset:
            self.ended.append(stream.length)
            # An episode that ended by itself at the end of a batch has begun anew before the next batch resets it.
            wasted = self.resets and t == length - 1 and not is_reset
            stream.episode, stream.step = stream.episode + 1 + wasted, 0
            stream.obs = self._flat(oracle.obs(stream.episode, 0))
        elif has_crashed:
            self._restart(stream)
        else:
            stream.obs = reached
        if any(flags):
            stream.traj_id, stream.length, stream.count = -1, 0, 0

    def _check_id(self, values: "_Values", row: int, t: int, stream: Stream, attempt: Attempt, where: str) -> None:
        found = int(values.traj_ids[row, t])
        assert attempt_of(found) == attempt, f"trajectory id at {where} is of {attempt_of(found)}"
        if t == 0 and self.gaps:
            self._catch_up(values, row, stream, found, where)
        if t == 0 and stream.traj_id not in (-1, found) and self.crashes:
            # It crashed before its first frame of this batch: there was no frame left to mark.
            self._restart(stream)
            stream.traj_id = -1
        if stream.traj_id == -1:
            ident = int(values.obs(row, t)[0][0]) if self.crashes else -1
            for _ in range(3 if self.crashes else 0):
                if ident != stream.seed % IDENT_MODULUS:
                    self._restart(stream)  # before the first frame of a trajectory, which then never was
            assert found not in self.used_ids, f"trajectory id {found} begins twice, at {where}"
            self.used_ids.add(found)
            stream.traj_id, stream.length, stream.count = found, 0, 0
        assert found == stream.traj_id, f"trajectory id at {where}: {found}, not {stream.traj_id}"

    def _catch_up(self, values: "_Values", row: int, stream: Stream, traj_id: int, where: str) -> None:
        *counts, echoed = values.obs(row, 0)[0].tolist()
        ident, episode, step = map(int, counts)
        assert ident == stream.seed % IDENT_MODULUS, f"another environment at {where}"
        assert (episode, step) >= (stream.episode, stream.step), f"an earlier frame at {where}"
        if (episode, step) == (stream.episode, stream.step):
            return
        stream.length += step - stream.step
        if episode != stream.episode:
            stream.traj_id = -1
        stream.episode, stream.step = episode, step
        stream.obs = (np.array([ident, episode, step, echoed], np.float32),)
        if stream.traj_id not in (-1, traj_id):
            raise AssertionError(f"trajectory id changed within an episode at {where}")

    def _check_version(self, values: "_Values", row: int, t: int, stream: Stream, where: str) -> None:
        version = int(values.version[row, t])
        assert version >= stream.version, f"version at {where}: {version} after {stream.version}"
        stream.version = version
        assert self.versions or version == -1, f"version at {where}: {version} of a random policy"
        if self.acts_by_version and version >= 0:
            acted = float(values.actions[0][row, t].reshape(-1)[0])
            assert acted == version, f"at {where} weights {acted} acted, stamped as version {version}"

    def _check_count(self, values: "_Values", row: int, t: int, stream: Stream, where: str) -> None:
        if values.count is None:
            return
        assert bool(values.is_init[row, t]) == (stream.length == 0), f"is_init at {where}"
        if t == 0 and self.gaps and stream.length:
            stream.count = int(values.count[row, t, 0])
        assert values.count[row, t, 0] == stream.count, f"state at {where}: {values.count[row, t]}, not {stream.count}"
        stream.count = stream.count + 1 if values.version[row, t] >= 0 else 0
        assert values.next_count[row, t, 0] == stream.count, f"next state at {where}: {values.next_count[row, t]}"

    def _restart(self, stream: Stream) -> None:
        stream.seed = restarted_seed(stream.seed)
        stream.restarts += 1
        stream.episode = stream.step = stream.length = stream.count = 0
        stream.obs = self._flat(self._oracle(stream).obs(0, 0))

    def _oracle(self, stream: Stream) -> Oracle:
        return Oracle(seed=stream.seed, **self._known)

    def _flat(self, observation: Any) -> Arrays:
        return flatten(self._observation_space, observation)


class _Values:
    def __init__(self, batch: Any, observation_space: Any, action_space: Any) -> None:
        keys = [leaf.key for leaf in leaves(observation_space, ("observation",))]
        self.observations = [batch[key].numpy() for key in keys]
        self.next_observations = [batch[("next", *key)].numpy() for key in keys]
        self.actions = [batch[leaf.key].numpy() for leaf in leaves(action_space, ("action",))]
        for space, arrays in ((observation_space, self.observations), (action_space, self.actions)):
            for leaf, array in zip(leaves(space, ()), arrays, strict=True):
                assert array.dtype == leaf.dtype
        self._unflatten = unflattener(action_space)
        self.reward, self.done, self.terminated, self.truncated = (
            batch["next", name].squeeze(-1).numpy() for name in ("reward", "done", "terminated", "truncated")
        )
        assert self.reward.dtype == np.float32
        self.traj_ids = batch["collector", "traj_ids"].numpy()
        self.version = batch["collector", "policy_version"].numpy()
        self.without_states = (
            *(self.reward, self.done, self.terminated, self.truncated, self.traj_ids, self.version),
            *(*self.actions, *self.next_observations),
        )
        self.count: Array | None = None
        if COUNT in batch.keys():  # noqa: SIM118  # a TensorDict, not a dict
            self.count, self.next_count = batch[COUNT].numpy(), batch["next", COUNT].numpy()
            self.is_init = batch["is_init"].squeeze(-1).numpy()

    def obs(self, row: int, t: int) -> Arrays:
        return tuple(array[row, t] for array in self.observations)

    def next_obs(self, row: int, t: int) -> Arrays:
        return tuple(array[row, t] for array in self.next_observations)

    def action(self, row: int, t: int) -> Any:
        return self._unflatten([array[row, t] for array in self.actions])


def _same(found: Arrays, expected: Arrays, what: str) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if not np.array_equal(ours, theirs):
            raise AssertionError(f"{what}: {ours.tolist()}, not {theirs.tolist()}")
