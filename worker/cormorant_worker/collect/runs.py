"""Where trajectories begin and continue in a complete block, computed once per block (`Block.runs`).

A *run* is the part of one trajectory in one column. Totals of a trajectory over several blocks (steps, a discounted
return, a metric) are in a `Carry`.

# T rows, B columns, S runs, F columns with frames
"""

from functools import cached_property

import numpy as np

from cormorant_worker.spaces import Array


class Runs:
    """The runs of a block, as arrays of the block's memory: valid until it is written again."""

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
