"""One batch's memory: preallocated, time-major, one array per key, all in one buffer that processes can share.

The collector writes it, row by row. The dataset writer and `batch.py` read it after it is sealed.

# T rows (steps), B columns (environments), K ends of trajectories

Observations and recurrent states are *carried*: row t is the input of step t and also the result of step t-1; so they
have T+1 rows and nothing is stored twice. Where a trajectory ends, the next row belongs to the next trajectory, and the
true last value is stored in `final`:

    T=3, B=2, column 1 ends at step 1        obs       next          final
                                        t=0  a0  b0    a1  b1
                                        t=1  a1  b1    a2  END   <-  END at (t=1, b=1)
                                        t=2  a2  c0    a3  c1
                                        t=3  a3  c1
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cormorant_worker.spaces import Array, Arrays, Leaf, put
from cormorant_worker.wire import ArrayCursor

_CARRIED = ("observation", "state")
TASK_ID = Leaf(key=("task_id",), shape=(), dtype=np.dtype(np.int64))
_ENDS = ("end_rows", "end_columns", "final", "final_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Arrays of a block. Equal layouts give equal bytes: workers of one fleet must agree on it."""

    num_rows: int
    """T: steps of every environment in a full batch."""
    num_envs: int
    """B."""
    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...] = ()
    """Outputs of the policy beside the action, e.g. `("action_log_prob",)`."""
    states: tuple[Leaf, ...] = ()
    """Recurrent states, stored as they were when the step began."""
    info: tuple[Leaf, ...] = ()
    """Within `next`: declared keys of the environments' info, `("info", key)`, and the rewards and flags of groups of
    agents, `(group, "reward")`.
    """
    task_names: tuple[str, ...] = ()
    """Names of the manifest's variants, in the order of their ids; empty without variants."""
    has_team_reward: bool = False
    """Batches have a reward beside those of groups of agents."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of agents, which have rewards and flags of their own."""
        return tuple(leaf.key[0] for leaf in self.info if leaf.key[1:] == ("done",) and leaf.key[0] != "info")

    @property
    def hides_reward(self) -> bool:
        """The block's reward is only for statistics."""
        return bool(self.groups) and not self.has_team_reward

    @property
    def tasks(self) -> tuple[Leaf, ...]:
        """Batches have `collector/task_id`, the variant that each environment plays."""
        return (TASK_ID,) if self.task_names else ()

    @property
    def num_frames(self) -> int:
        """Frames of a full batch, T * B."""
        return self.num_rows * self.num_envs

    def fields(self) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """Name, shape and dtype of every array, in the order in which they lie in memory."""
        rows, envs, ends = self.num_rows, self.num_envs, self.num_frames
        whole, flag = np.dtype(np.int64), np.dtype(np.bool_)

        def series(name: str, first: tuple[int, ...], leaves: tuple[Leaf, ...]) -> Iterator[Any]:
            return ((f"{name}.{i}", (*first, *leaf.shape), leaf.dtype) for i, leaf in enumerate(leaves))

        yield from series("observation", (rows + 1, envs), self.observation)
        yield from series("action", (rows, envs), self.action)
        yield from series("output", (rows, envs), self.outputs)
        yield from series("state", (rows + 1, envs), self.states)
        yield from series("info", (rows, envs), self.info)
        yield from series("task", (rows, envs), self.tasks)
        yield "reward", (rows, envs), np.dtype(np.float32)
        yield from ((name, (rows, envs), flag) for name in ("terminated", "truncated", "is_init"))
        yield from ((name, (rows, envs), whole) for name in ("traj_ids", "policy_version"))
        yield "lengths", (envs,), whole
        # Room for an end at every frame. Pages that are never written take no memory.
        yield from ((name, (ends,), whole) for name in ("end_rows", "end_columns"))
        yield from series("final", (ends,), self.observation)
        yield from series("final_state", (ends,), self.states)

    @property
    def description(self) -> str:
        """Keys, dtypes and shapes of what a frame holds, to compare with."""
        held = (*self.observation, *self.action, *self.outputs, *self.states, *self.info)
        return "; ".join(f"{'.'.join(leaf.key)} {leaf.dtype.name}{list(leaf.shape)}" for leaf in held)

    @property
    def size_bytes(self) -> int:
        """Bytes of address space that one block takes."""
        cursor = ArrayCursor()
        for _, shape, dtype in self.fields():
            cursor.take(shape, dtype)
        return cursor.size_bytes


class Block:
    """The arrays of one batch over one buffer. Written by one collector, then sealed, then read."""

    def __init__(
        self,
        layout: Layout,
        buffer: memoryview | bytearray | None = None,
        *,
        arrays: Mapping[str, Array] | None = None,
    ) -> None:
        """Lay the arrays over `layout.size_bytes` of a buffer, such as shared memory; None: over memory of its own.
        `arrays`: instead, the `used_arrays` of another one, for a sealed block of exactly as many rows.
        """
        if arrays is None:
            cursor = ArrayCursor(np.zeros(layout.size_bytes, dtype=np.uint8) if buffer is None else buffer)
            arrays = {name: cursor.take(shape, dtype) for name, shape, dtype in layout.fields()}
        self.layout = layout
        self._arrays = arrays
        self.observation = _series(arrays, "observation")
        self.action = _series(arrays, "action")
        self.outputs = _series(arrays, "output")
        self.states = _series(arrays, "state")
        self.info = _series(arrays, "info")
        self.tasks = _series(arrays, "task")
        self.final = _series(arrays, "final")
        self.final_states = _series(arrays, "final_state")
        self.reward = arrays["reward"]
        self.terminated = arrays["terminated"]
        self.truncated = arrays["truncated"]
        self.is_init = arrays["is_init"]
        self.traj_ids = arrays["traj_ids"]
        self.policy_version = arrays["policy_version"]
        self.lengths = arrays["lengths"]
        self.end_rows = arrays["end_rows"]
        self.end_columns = arrays["end_columns"]
        self.num_rows = 0
        self.num_ends = 0
        self._runs: Runs | None = None

    def used_arrays(self) -> dict[str, Array]:
        """Contiguous views of the used part of every array, by name."""
        used = {"lengths": self.layout.num_envs}
        used |= dict.fromkeys(_CARRIED, self.num_rows + 1) | dict.fromkeys(_ENDS, self.num_ends)
        return {name: array[: used.get(name.partition(".")[0], self.num_rows)] for name, array in self._arrays.items()}

    def begin(self, num_rows: int) -> None:
        """Forget the last batch and prepare for one of `num_rows` <= T steps."""
        self.num_rows = num_rows
        self.num_ends = 0
        self._runs = None

    def end(self, rows: Array | int, columns: Array, final: Arrays) -> None:
        """Note that trajectories ended: k columns at their rows, with their true last values [k, ...] per leaf of the
        observation, then per state.
        """
        start, stop = self.num_ends, self.num_ends + len(columns)
        self.end_rows[start:stop] = rows
        self.end_columns[start:stop] = columns
        put(self.final + self.final_states, slice(start, stop), final)
        self.num_ends = stop

    @property
    def num_frames(self) -> int:
        """Number of frames in this batch; fewer than rows * B if columns have different lengths."""
        return int(self.lengths.sum())

    @property
    def versions(self) -> Array:
        """[N] int64: the policy version of each frame, in the order of rows."""
        versions, mask_TB = self.policy_version[: self.num_rows], self.mask
        return versions if mask_TB is None else versions[mask_TB]

    @property
    def mask(self) -> Array | None:
        """[T, B] bool, True on frames; None when every column has all rows."""
        return None if self.is_full else np.arange(self.num_rows)[:, None] < self.lengths[None, :]

    @property
    def runs(self) -> "Runs":
        """The runs of a complete batch."""
        if self._runs is None:
            self._runs = Runs(self.traj_ids[: self.num_rows], self.lengths)
        return self._runs

    @property
    def is_full(self) -> bool:
        """True when every column has all rows: then the batch needs no mask."""
        return bool((self.lengths == self.num_rows).all())

    @property
    def agent_steps(self) -> int:
        """Actions of agents that acted, over all groups; 0 without groups."""
        if not (groups := self.layout.groups):
            return 0
        obs = {leaf.key: array for leaf, array in zip(self.layout.observation, self.observation, strict=True)}
        is_frame = slice(None) if (mask_TB := self.mask) is None else mask_TB
        return sum(int(np.count_nonzero(obs[group, "mask"][: self.num_rows][is_frame])) for group in groups)

    def end_agents(self) -> None:
        """Mark all agents of ended trajectories as ended. Idempotent."""
        rows = slice(self.num_rows)
        info = {leaf.key: array[rows] for leaf, array in zip(self.layout.info, self.info, strict=True)}
        for group in self.layout.groups:
            done = info[group, "done"]
            truncated, terminated = (flag[rows, :, None, None] for flag in (self.truncated, self.terminated))
            goes_on = ~done & (truncated | terminated)
            info[group, "truncated"] |= goes_on & truncated
            info[group, "terminated"] |= goes_on & ~truncated
            done |= goes_on

    def blank_padding(self) -> None:
        """Zero the rows past a column's end, which may hold earlier batches. Has no effect on a full batch."""
        if (mask_TB := self.mask) is None:
            return
        rows, columns = np.nonzero(~mask_TB)
        flags = (self.terminated, self.truncated, self.is_init)
        for array in (*self.action, *self.outputs, *self.info, *self.tasks, self.reward, *flags):
            array[rows, columns] = 0
        self.traj_ids[rows, columns] = 0
        self.policy_version[rows, columns] = 0
        # Row t+1 of a carried array is the `next` of row t: a column of length n keeps its rows 0..n.
        for array in (*self.observation, *self.states):
            array[rows + 1, columns] = 0


def _series(arrays: Mapping[str, Array], name: str) -> Arrays:
    found: list[Array] = []
    while (array := arrays.get(f"{name}.{len(found)}")) is not None:
        found.append(array)
    return tuple(found)


class Runs:
    """Where trajectories begin and continue in a complete block, as arrays of its memory: valid until it is written
    again. A *run* is the part of one trajectory in one column; S runs, F columns with frames.
    """

    def __init__(self, ids: Array, lengths: Array) -> None:
        """`ids`: [T, B] trajectory of each frame; `lengths`: [B] frames of each column."""
        self.ids = ids
        self.begins: Array = np.ones(ids.shape, dtype=np.bool_)
        """[T, B] True on the first frame of a run."""
        np.not_equal(ids[1:], ids[:-1], out=self.begins[1:])
        short = np.flatnonzero(lengths < len(ids))
        self.begins[lengths[short], short] = True  # what an earlier batch left there is a run of its own
        self.filled = np.flatnonzero(lengths)
        """[F] columns with frames."""
        self.last_rows = lengths[self.filled] - 1
        """[F] rows of their last frames."""

    @cached_property
    def _starts(self) -> Array:
        """[S] first frames, as positions in the columns laid one after the other."""
        return np.flatnonzero(self.begins.T)

    def at(self, rows: Array | int, columns: Array) -> Array:
        """Run numbers of these frames."""
        return np.searchsorted(self._starts, columns * len(self.ids) + rows, side="right") - 1

    def lengths(self) -> Array:
        """[S] frames; undefined for runs without frames."""
        return np.diff(self._starts, append=self.ids.size)

    def fold(self, ufunc: np.ufunc, values: Array) -> Array:
        """[S] float64: `values` [T, B] of each run, reduced."""
        return np.asarray(ufunc.reduceat(np.ascontiguousarray(values.T, dtype=np.float64).reshape(-1), self._starts))


class Carry:
    """[B] running total of each column's trajectory at its last frame, for blocks given once and in order."""

    def __init__(self, num_envs: int, *, start: float = 0.0) -> None:
        """`start`: of a trajectory without a frame."""
        self._start = start
        self._values: Array = np.zeros(num_envs)
        self._ids: Array = np.full(num_envs, -1, dtype=np.int64)

    def of(self, ids: Array) -> Array:
        """[B] running totals of these trajectories."""
        return np.where(ids == self._ids, self._values, self._start)

    def gather(self, runs: Runs, values: Array, fold: np.ufunc = np.add) -> Array:
        """[S] running total of the trajectory at the end of each run of a block; `values` [S] are the totals of the
        runs alone.
        """
        first = runs.at(0, runs.filled)
        gathered = values.astype(np.float64)
        gathered[first] = fold(gathered[first], self.of(runs.ids[0])[runs.filled])
        self.keep(runs, gathered[runs.at(runs.last_rows, runs.filled)])
        return gathered

    def keep(self, runs: Runs, values: Array) -> None:
        """Store `values` [F], the running totals at the last frames of a block."""
        self._values[runs.filled], self._ids[runs.filled] = values, runs.ids[runs.last_rows, runs.filled]

    def go_on(self, ids: Array, values: Array) -> None:
        """Continue these trajectories with the running totals `values`."""
        self._ids, self._values = ids.copy(), np.array(values, np.float64)
