"""Environments that return whenever they are ready, in no fixed order (EnvPool with `batchSize < numEnvs`).

Rows fill unevenly, so frames are kept in a ring of their own, one column an environment, and copied into the block
when the slowest column has its quota. What faster columns have beyond it is the beginning of the next batch.

# S rows of the ring, n columns, k of them at a time; "position" counts frames of a column from its first one
"""

import numpy as np

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.env_group import Columns, decide, receive
from cormorant_worker.collect.timing import Laps
from cormorant_worker.collect.trajectories import Trajectories
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.errors import EnvCrashed, EnvNotSaved
from cormorant_worker.policy.action_check import ActionCheck
from cormorant_worker.policy.actor import Actor
from cormorant_worker.spaces import Array, Arrays

_FIRST_SIZE = 64


class AsyncEnvGroup:
    """Steps one VectorEnv that is not in lockstep. Driven by a Collector like a `LockstepEnvGroup`."""

    def __init__(self, env: VectorEnv, columns: Columns, trajectories: Trajectories, check: ActionCheck) -> None:
        self.env = env
        self.laps: Laps | None = None
        self.columns = columns
        self._trajectories = trajectories
        self._check = check
        n = env.num_envs
        self._lengths = trajectories.lengths[columns.slice]
        self._ids = trajectories.ids[columns.slice]
        self.is_init: Array = np.ones(n, dtype=np.bool_)
        self._initial_states: Arrays = ()
        self._landed: Array = np.zeros(n, dtype=np.int64)
        """[n] position of each column's open frame."""
        self._handed: Array = np.zeros(n, dtype=np.int64)
        """[n] position of the first frame that is not handed over yet."""
        self._quota: Array = np.zeros(n, dtype=np.int64)
        self._idle: Array = np.arange(n)
        self._ends: list[tuple[int, int, Arrays, Arrays]] = []
        """(column, position, final observation, final state) of ends that are not handed over yet."""
        self._size = 0
        self._arrays: Arrays = ()

    def start(self, initial_states: Arrays, layout: Layout) -> None:
        """Begin the first episodes and lay out the ring."""
        self._initial_states = initial_states
        self._layout = layout
        self._grow(_FIRST_SIZE)
        for stored, first in zip(self._obs, self.env.start(), strict=True):
            stored[0] = first
        for stored, initial in zip(self._states, initial_states, strict=True):
            stored[0] = initial

    def restart(self) -> None:
        """Begin new trajectories: the environments are under way and play on, under new ids from here."""
        self._trajectories.open(self.columns.slice)
        self.is_init[:] = True
        columns = np.arange(self.env.num_envs)
        is_under_way = ~np.isin(columns, self._idle)
        # The next row that a column acts on: of one under way, the row that its frame leads to.
        rows = (self._landed + is_under_way) % self._size
        for stored, initial in zip(self._states, self._initial_states, strict=True):
            stored[rows, columns] = initial

    def begin(self, block: Block, quota: Array) -> None:
        self._block = block
        self._quota[:] = quota
        if (longest := int(quota.max(initial=0))) * 2 + 2 > self._size:
            self._grow(longest * 2 + 2)

    @property
    def is_done(self) -> bool:
        return bool((self._landed - self._handed >= self._quota).all())

    def cut(self) -> None:
        landed = self._landed - self._handed
        if landed.any():
            np.minimum(self._quota, landed, out=self._quota)

    def stop(self, columns: Array) -> None:
        landed = self._landed[columns] - self._handed[columns]
        self._quota[columns] = np.minimum(self._quota[columns], landed)

    def ends_ahead(self) -> list[tuple[int, int]]:
        return [(column, position - int(self._handed[column]) + 1) for column, position, *_ in self._ends]

    @property
    def quota(self) -> Array:
        return self._quota

    def act(self, actor: Actor, version: int) -> None:
        """Decide for all rows that are back, and send them. Rows that are far ahead wait, as long as enough go on."""
        room = self._size - 2 - (self._landed[self._idle] - self._handed[self._idle])
        under_way = self.env.num_envs - len(self._idle)
        if not (room > 0).all() and under_way + int((room > 0).sum()) < self.env.min_in_flight:
            self._grow(self._size * 2)
            room = np.ones(len(self._idle))
        columns, self._idle = self._idle[room > 0], self._idle[room <= 0]
        if not len(columns):
            return
        rows = self._landed[columns] % self._size
        obs = tuple(a[rows, columns] for a in self._obs)
        states = tuple(a[rows, columns] for a in self._states)
        acted, decided = decide(actor, obs, states, self.is_init[columns], version, self.laps)
        self._check.values(acted.actions)
        self.env.send(acted.actions, columns)
        for stored, value in zip(self._action, acted.actions, strict=True):
            stored[rows, columns] = value
        for stored, value in zip(self._outputs, acted.outputs, strict=True):
            stored[rows, columns] = value
        self._ring_ids[rows, columns] = self._ids[columns]
        self._ring_version[rows, columns] = decided
        self._ring_init[rows, columns] = self.is_init[columns]
        self.is_init[columns] = False
        following = (self._landed[columns] + 1) % self._size
        for stored, value in zip(self._states, acted.states, strict=True):
            stored[following, columns] = value

    def land(self) -> int:
        """Wait for some rows and keep them. Returns the number of frames."""
        step = receive(self.env, self.laps)
        columns = np.arange(self.env.num_envs) if isinstance(step.rows, slice) else step.rows
        rows = self._landed[columns] % self._size
        following = (self._landed[columns] + 1) % self._size
        self._reward[rows, columns] = step.reward
        self._terminated[rows, columns] = step.terminated
        self._truncated[rows, columns] = step.truncated
        for stored, value in zip(self._obs, step.obs, strict=True):
            stored[following, columns] = value
        for stored, value in zip(self._info, step.info, strict=True):
            stored[rows, columns] = value
        self._lengths[columns] += 1
        self._landed[columns] += 1
        if len(step.ended):
            self._end(columns[step.ended], following[step.ended], step.final)
        self._idle = np.concatenate([self._idle, columns])
        return len(columns)

    def finish(self) -> None:
        """Copy each column's quota from the ring into the block."""
        rows = int(self._quota.max(initial=0))
        n = self.env.num_envs
        columns = np.arange(n)[None, :]
        at = (self._handed[None, :] + np.arange(rows + 1)[:, None]) % self._size
        block, ours = self._block, self.columns.slice
        for stored, ring in (
            *zip(block.observation, self._obs, strict=True),
            *zip(block.states, self._states, strict=True),
        ):
            stored[: rows + 1, ours] = ring[at, columns]
        at = at[:rows]
        for stored, ring in (
            *zip(block.action, self._action, strict=True),
            *zip(block.outputs, self._outputs, strict=True),
            *zip(block.info, self._info, strict=True),
            (block.reward, self._reward),
            (block.terminated, self._terminated),
            (block.truncated, self._truncated),
            (block.is_init, self._ring_init),
            (block.traj_ids, self._ring_ids),
            (block.policy_version, self._ring_version),
        ):
            stored[:rows, ours] = ring[at, columns]
        self._hand_over_ends()
        self._handed += self._quota

    def look(self, column: int, leaf: int) -> Array:
        """A copy of one leaf of what a column acts on next, or acted on last."""
        ring = self._obs[leaf]
        return np.array(ring[int(self._landed[column]) % len(ring), column])

    def state(self) -> dict[str, Array]:
        raise EnvNotSaved("with batchSize below numEnvs some environments always have a step in flight")

    def restore(self, state: dict[str, Array]) -> None:
        """Never called: there is no state."""
        raise EnvCrashed("environments with steps in flight cannot be restored")

    def _hand_over_ends(self) -> None:
        later = []
        for column, position, final, final_states in self._ends:
            row = position - int(self._handed[column])
            if row >= self._quota[column]:
                later.append((column, position, final, final_states))
                continue
            self._block.end(row, np.array([column + self.columns.first]), final, final_states)
        self._ends = later

    def _end(self, columns: Array, following: Array, final: Arrays) -> None:
        for i, column in enumerate(columns.tolist()):
            one = slice(i, i + 1)
            states = tuple(a[following[one], column].copy() for a in self._states)
            self._ends.append((column, int(self._landed[column]) - 1, tuple(a[one] for a in final), states))
        self._trajectories.open(columns + self.columns.first)
        self.is_init[columns] = True
        for stored, initial in zip(self._states, self._initial_states, strict=True):
            stored[following, columns] = initial

    def _grow(self, size: int) -> None:
        """Move the ring into a larger one, every frame that is not handed over with it."""
        n, old_size, old = self.env.num_envs, self._size, self._arrays
        layout = self._layout
        leaves = (*layout.observation, *layout.action, *layout.outputs, *layout.states, *layout.info)
        self._arrays = (
            *(np.zeros((size, n, *leaf.shape), leaf.dtype) for leaf in leaves),
            np.zeros((size, n), np.float32),
            *(np.zeros((size, n), np.bool_) for _ in range(3)),
            *(np.zeros((size, n), np.int64) for _ in range(2)),
        )
        if old_size:
            columns = np.arange(n)[None, :]
            positions = self._handed[None, :] + np.arange(old_size)[:, None]
            for new, kept in zip(self._arrays, old, strict=True):
                new[positions % size, columns] = kept[positions % old_size, columns]
        self._size = size
        parts = iter(self._arrays)
        self._obs = tuple(next(parts) for _ in layout.observation)
        self._action = tuple(next(parts) for _ in layout.action)
        self._outputs = tuple(next(parts) for _ in layout.outputs)
        self._states = tuple(next(parts) for _ in layout.states)
        self._info = tuple(next(parts) for _ in layout.info)
        self._reward, self._terminated, self._truncated, self._ring_init, self._ring_ids, self._ring_version = parts
