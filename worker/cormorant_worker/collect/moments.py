"""What one batch adds to the statistics of its job: computed once a batch, over exactly the frames in it.

Observations: those that were acted on, [T, B], without what only followed. Rewards: the discounted return of each
frame, g_t = r_t + gamma * g_t-1, which goes on over batches and begins again with each trajectory.

# T rows, B columns
"""

import numpy as np

from cormorant_worker.collect.block import Block
from cormorant_worker.errors import EnvError
from cormorant_worker.normalize.moments import REWARD, RunningMoments, Statistics
from cormorant_worker.policy.normalizer import Normalizer
from cormorant_worker.spaces import Array


class BatchMoments:
    """Moments of one collector's batches, each given once and in order."""

    def __init__(self, normalizer: Normalizer, num_envs: int) -> None:
        self._names, self._settings = normalizer.names, normalizer.settings
        self.initial = normalizer.statistics
        """What the initial weights act with."""
        self._open: Array = np.zeros(num_envs)
        """[B] discounted return of the trajectory of each column's last frame, up to that frame."""
        self._ids: Array = np.full(num_envs, -1, dtype=np.int64)
        """[B] that trajectory."""

    def of(self, block: Block) -> Statistics:
        """Moments of a complete batch.

        Raises:
            EnvError: a value is not finite.
        """
        rows = block.num_rows
        kept = None if block.is_full else np.arange(rows)[:, None] < block.lengths[None, :]
        found: dict[str, RunningMoments] = {}
        if self._settings.observation is not None:
            for name, stored in zip(self._names, block.observation, strict=True):
                if name:
                    found[name] = self._moments(name, stored[:rows], kept, block, self._settings.observation.clip)
        if (reward := self._settings.reward) is not None:
            returns = self._returns(block, reward.gamma)
            found[REWARD] = self._moments(REWARD, returns, kept, block, reward.clip)
        return Statistics(found)

    def open_returns(self, ids: Array) -> Array:
        """[B] discounted return so far of the trajectories that are open now."""
        returns: Array = np.where(ids == self._ids, self._open, 0.0)
        return returns

    def go_on(self, returns: Array, ids: Array) -> None:
        """The open trajectories are these, with these discounted returns so far."""
        self._open, self._ids = returns.copy(), ids.copy()

    def _returns(self, block: Block, gamma: float) -> Array:
        """[T, B] float64, by a scan in log2(T) passes; garbage past a column's length."""
        rows = block.num_rows
        ids = block.traj_ids[:rows]
        returns = block.reward[:rows].astype(np.float64)
        decay = np.full(returns.shape, gamma)
        decay[0] = np.where(ids[0] == self._ids, gamma, 0.0)
        decay[1:][ids[1:] != ids[:-1]] = 0.0
        returns[0] += decay[0] * self._open
        span = 1
        while span < rows:
            # Row t holds its return over the last `span` rows, and what an earlier one is still worth there.
            returns[span:] += decay[span:] * returns[:-span]
            decay[span:] = decay[span:] * decay[:-span]
            span *= 2
        columns = np.flatnonzero(block.lengths > 0)
        last = block.lengths[columns] - 1
        self._open[columns], self._ids[columns] = returns[last, columns], ids[last, columns]
        return returns

    @staticmethod
    def _moments(name: str, values: Array, kept: Array | None, block: Block, clip: float) -> RunningMoments:
        frames = values.reshape(-1, *values.shape[2:]) if kept is None else values[kept]
        found = RunningMoments.of(frames, clip=clip)
        if not (np.isfinite(found.mean).all() and np.isfinite(found.m2).all()):
            inside = np.ones(values.shape[:2], dtype=np.bool_) if kept is None else kept
            bad = ~np.isfinite(values.reshape(*values.shape[:2], -1)).all(axis=2) & inside
            row, column = (int(i[0]) for i in np.nonzero(bad)) if bad.any() else (0, 0)
            raise EnvError(
                f"environment {column} returned {name} {values[row, column].ravel()[:8].tolist()} at step {row} of a "
                "batch; statistics cannot hold it: correct the environment, or name the other leaves in "
                "spec.collection.normalize.observation.keys"
            )
        return found
