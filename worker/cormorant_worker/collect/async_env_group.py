"""Environments that return as they become ready, in any order (EnvPool with `batchSize < numEnvs`).

Columns fill unevenly, so frames are kept in a ring, a separate block with one column per environment, and copied into
the block when the slowest column has its quota. Surplus frames of faster columns begin the next batch.

# S rows of the ring, n columns, k of them at a time; "position" counts frames of a column from its first one
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.env_group import EnvGroup
from cormorant_worker.errors import EnvCrashed, EnvNotSaved
from cormorant_worker.policy.actor import Actor
from cormorant_worker.spaces import Array, Arrays, put

_FIRST_SIZE = 64


class AsyncEnvGroup(EnvGroup):
    """Steps one VectorEnv that is not in lockstep. Driven by a Collector like a `LockstepEnvGroup`."""

    def start(self, initial_states: Arrays, layout: Layout) -> None:
        super().start(initial_states, layout)
        self._layout = layout
        self._size = 0
        """S."""
        self._ring: Block
        self._begin(self.env.start())

    def restart(self) -> None:
        """Drop the frames that are not handed over yet: their trajectories end with the last batch."""
        self._trajectories.open(self.columns)
        self._begin(self.env.restart(np.arange(self.env.num_envs)))

    def _begin(self, first: Arrays) -> None:
        n = self.env.num_envs
        self._landed: Array = np.zeros(n, dtype=np.int64)
        """[n] position of each column's open frame."""
        self._handed: Array = np.zeros(n, dtype=np.int64)
        """[n] position of the first frame that is not handed over yet."""
        self._idle: Array = np.arange(n)
        self._ends: list[Arrays] = []
        """(columns [k], positions [k], *final observations, *final states) of ends that are not handed over yet."""
        self._is_under_way, self.is_init[:] = False, True
        self._grow(max(self._size, _FIRST_SIZE))
        put(self._obs + self._states, 0, first + self._initial_states)

    def begin(self, block: Block, quota: Array) -> None:
        self._block = block
        self.quota[:] = quota
        if (longest := int(quota.max(initial=0))) * 2 + 2 > self._size:
            self._grow(longest * 2 + 2)

    def pending(self) -> Arrays | None:
        if len(self._idle) < self.env.num_envs or self.landed.any():
            return None
        return tuple(a[self._landed % self._size, np.arange(self.env.num_envs)] for a in self._obs + self._states)

    def go_on(self, pending: Arrays) -> None:
        put(self._obs + self._states, (self._landed % self._size, np.arange(self.env.num_envs)), pending)

    @property
    def landed(self) -> Array:
        return self._landed - self._handed

    def ends_ahead(self) -> list[tuple[int, int]]:
        lengths = [(columns, positions - self._handed[columns] + 1) for columns, positions, *_ in self._ends]
        return [pair for both in lengths for pair in zip(*(part.tolist() for part in both), strict=True)]

    def act(self, actor: Actor, version: int) -> None:
        """Choose actions for all returned rows. Rows that are far ahead wait while enough others continue."""
        room = self._size - 2 - self.landed[self._idle]
        under_way = self.env.num_envs - len(self._idle)
        if not (room > 0).all() and under_way + int((room > 0).sum()) < self.env.min_in_flight:
            self._grow(self._size * 2)
            room = np.ones(len(self._idle))
        columns, self._idle = self._idle[room > 0], self._idle[room <= 0]
        if not len(columns):
            return
        rows = self._landed[columns]
        at, after = (rows % self._size, columns), ((rows + 1) % self._size, columns)
        self._act_at(actor, version, columns, at, after)

    def land(self) -> int:
        """Wait for some rows and store them. Returns the number of frames."""
        step = self._receive()
        columns = np.arange(self.env.num_envs) if isinstance(step.rows, slice) else step.rows
        rows, following = self._landed[columns] % self._size, (self._landed[columns] + 1) % self._size
        self._write_step(step, (rows, columns), (following, columns))
        self._landed[columns] += 1
        if len(step.ended):
            ended, after = columns[step.ended], following[step.ended]
            states = (a[after, ended] for a in self._stored_states)
            self._ends.append((ended, self._landed[ended] - 1, *(a.copy() for a in step.final), *states))
            self._trajectories.open(ended + self.columns.start)
            self._begin_trajectories(after, ended)
        self._idle = np.concatenate([self._idle, columns])
        return len(columns)

    def finish(self) -> None:
        rows = int(self.quota.max(initial=0))
        columns = np.arange(self.env.num_envs)[None, :]
        at = (self._handed[None, :] + np.arange(rows + 1)[:, None]) % self._size
        for (stored, carries), (ring, _) in zip(_series(self._block), _series(self._ring), strict=True):
            stored[: rows + carries, self.columns] = ring[at[: rows + carries], columns]
        if self._ends:
            ends = [np.concatenate(parts) for parts in zip(*self._ends, strict=True)]
            is_later = ends[1] >= (self._handed + self.quota)[ends[0]]
            ended, positions, *final = (part[~is_later] for part in ends)
            self._block.end(positions - self._handed[ended], ended + self.columns.start, tuple(final))
            self._ends = [tuple(part[is_later] for part in ends)] if is_later.any() else []
        self._handed += self.quota

    def look(self, column: int, leaf: int) -> Array:
        """A copy of one leaf of a column's next or latest observation."""
        ring = self._obs[leaf]  # it may be moved meanwhile: its own length counts, of S + 1
        return np.array(ring[int(self._landed[column]) % (len(ring) - 1), column])

    def state(self) -> dict[str, Array]:
        raise EnvNotSaved("environments that are not in lockstep always have a step in flight")

    def restore(self, state: dict[str, Array]) -> None:
        """Refuse states with saved environments: they come from another kind with the same spaces."""
        raise EnvCrashed("environments with steps in flight cannot be restored")

    def _grow(self, size: int) -> None:
        """Move the ring into a larger one, every frame that is not handed over with it."""
        n, old_size = self.env.num_envs, self._size
        new = Block(replace(self._layout, num_rows=size, num_envs=n, task_names=()))
        if old_size:
            columns = np.arange(n)[None, :]
            positions = self._handed[None, :] + np.arange(old_size)[:, None]
            for (stored, _), (kept, _) in zip(_series(new), _series(self._ring), strict=True):
                stored[positions % size, columns] = kept[positions % old_size, columns]
        self._ring, self._size = new, size
        self._aim(new, slice(None))


def _series(block: Block) -> Iterator[tuple[Array, bool]]:
    """Arrays of a block and the ring, and whether each is carried, that is, has a row after the last frame, too."""
    yield from ((array, True) for array in (*block.observation, *block.states))
    frames = (block.reward, block.terminated, block.truncated, block.is_init, block.traj_ids, block.policy_version)
    yield from ((array, False) for array in (*block.action, *block.outputs, *block.info, *frames))
