"""What one `collect` did: Tianshou's CollectStats, field by field, and percentiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cormorant_worker.block import Block
from cormorant_worker.spaces import Array

_QUANTILES = np.array([0.05, 0.25, 0.5, 0.75, 0.95])


@dataclass(kw_only=True)
class SequenceStats:
    """A summary of one number an episode."""

    mean: float
    std: float
    """Of the population, as numpy's."""
    max: float
    min: float
    median: float
    p5: float
    p25: float
    p75: float
    p95: float

    @classmethod
    def from_sequence(cls, sequence: Sequence[float] | npt.NDArray[np.generic]) -> "SequenceStats":
        """Summarise at least one number. Raises ValueError of none."""
        values = np.sort(np.asarray(sequence, dtype=np.float64).reshape(-1))
        if not values.size:
            raise ValueError("there is nothing to summarise: the sequence is empty")
        # numpy's percentile, without the hundred microseconds that it takes beside the arithmetic.
        at = _QUANTILES * (len(values) - 1)
        low = at.astype(np.int64)
        high = np.minimum(low + 1, len(values) - 1)
        p5, p25, median, p75, p95 = (values[low] + (values[high] - values[low]) * (at - low)).tolist()
        return cls(
            mean=float(values.mean()),
            std=float(values.std()),
            max=float(values[-1]),
            min=float(values[0]),
            median=median,
            p5=p5,
            p25=p25,
            p75=p75,
            p95=p95,
        )


@dataclass(kw_only=True)
class CollectStats:
    """What one `collect` did. Fields have Tianshou's names and meanings."""

    n_collected_episodes: int = 0
    """Episodes that ended; with `n_episode`, exactly so many."""
    n_collected_steps: int = 0
    """Frames that were stored; with `n_step`, exactly so many."""
    n_skipped_steps: int = 0
    """Frames of episodes that were under way when `n_episode` began, which AsyncCollector plays to their end and does
    not store: an episode that was cut is none."""
    collect_time: float = 0.0
    """Seconds."""
    collect_speed: float = 0.0
    """Frames a second."""
    returns: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """Undiscounted returns of the episodes that ended, float64 `[n]`: by environment, then time."""
    returns_stat: SequenceStats | None = None
    """None when no episode ended."""
    lens: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Their lengths in frames, int64 `[n]`."""
    lens_stat: SequenceStats | None = None
    """None when no episode ended."""

    def refresh_sequence_stats(self) -> None:
        """Summarise `returns` and `lens` again, after one of them was changed."""
        self.returns_stat = SequenceStats.from_sequence(self.returns) if self.returns.size else None
        self.lens_stat = SequenceStats.from_sequence(self.lens) if self.lens.size else None


class Tally:
    """Returns and lengths of episodes, made from the blocks that are handed over, over any number of batches."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)

    def forget(self) -> None:
        """Every environment begins anew."""
        self._returns[:] = 0.0
        self._lengths[:] = 0

    @property
    def is_fresh(self) -> Array:
        """[B] bool: the environment's next frame is the first of its episode."""
        fresh: Array = self._lengths == 0
        return fresh

    def take(self, block: Block, lost: set[int]) -> tuple[Array, Array, Array]:
        """Count a batch.

        Args:
            block: sealed.
            lost: trajectories that ended with a crash of their environment: no episodes.

        Returns:
            Column int64, return float64 and length int64 of each episode that ended, by column, then time.
        """
        rows, ends = block.num_rows, block.num_ends
        at, columns = block.end_rows[:ends], block.end_columns[:ends]
        order = np.lexsort((at, columns))
        at, columns = at[order], columns[order]
        # One run a column, cut after each end; every cut is where a sum begins.
        rewards = np.append(block.reward[:rows].T.astype(np.float64).reshape(-1), 0.0)
        starts = np.arange(len(block.lengths)) * rows
        before = np.flatnonzero(np.append(True, columns[1:] != columns[:-1])) if ends else np.empty(0, np.int64)
        begins = np.append(0, columns[:-1] * rows + at[:-1] + 1) if ends else np.empty(0, np.int64)
        begins[before] = starts[columns[before]]
        stops = columns * rows + at + 1
        returns = _sums(rewards, begins, stops)
        lengths = stops - begins
        returns[before] += self._returns[columns[before]]
        lengths[before] += self._lengths[columns[before]]
        is_lost = np.isin(block.traj_ids[at, columns], list(lost)) if lost else np.zeros(ends, dtype=np.bool_)

        ended = np.unique(columns)
        last = np.flatnonzero(np.append(columns[1:] != columns[:-1], True)) if ends else np.empty(0, np.int64)
        open_from = starts.copy()
        open_from[ended] = stops[last]
        open_to = starts + block.lengths
        self._returns[ended] = 0.0
        self._lengths[ended] = 0
        self._returns += _sums(rewards, open_from, open_to)
        self._lengths += open_to - open_from
        return columns[~is_lost], returns[~is_lost], lengths[~is_lost]


def _sums(values: Array, begins: Array, stops: Array) -> Array:
    """Sums of values[begin:stop], zero where that is empty. `values` has one element too many, for reduceat."""
    pairs = np.stack([begins, stops], axis=1).reshape(-1)
    if not len(pairs):
        return np.zeros(0)
    return np.where(stops > begins, np.add.reduceat(values, pairs)[::2], 0.0)
