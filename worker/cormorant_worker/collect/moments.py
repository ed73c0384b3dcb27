"""Moments of one batch for the statistics of its job, computed once, over exactly its frames.

Observations: the policy's inputs, [T, B], without final observations. Rewards: the discounted return of each
frame, g_t = r_t + gamma * g_t-1, which continues over batches and begins again with each trajectory.

# T rows, B columns
"""

import numpy as np

from cormorant_worker.collect.block import Block, Carry
from cormorant_worker.errors import EnvError
from cormorant_worker.normalize.moments import REWARD, RunningMoments, Statistics
from cormorant_worker.policy.normalizer import Normalizer
from cormorant_worker.spaces import Array


class BatchMoments:
    """Moments of one collector's batches, each given once and in order."""

    def __init__(self, normalizer: Normalizer, num_envs: int) -> None:
        self._names, self._settings = normalizer.names, normalizer.settings
        self.initial = normalizer.statistics
        """Statistics that the initial weights act with."""
        self.open_returns = Carry(num_envs)
        """Discounted returns."""

    def of(self, block: Block) -> Statistics:
        """Moments of a complete batch. Raises EnvError where a value is not finite."""
        rows, kept = block.num_rows, block.mask
        found: dict[str, RunningMoments] = {}
        if self._settings.observation is not None:
            for name, stored in zip(self._names, block.observation, strict=True):
                if name:
                    found[name] = self._moments(name, stored[:rows], kept, block, self._settings.observation.clip)
        if (reward := self._settings.reward) is not None:
            returns = self._returns(block, reward.gamma)
            found[REWARD] = self._moments(REWARD, returns, kept, block, reward.clip)
        return Statistics(found)

    def _returns(self, block: Block, gamma: float) -> Array:
        """[T, B] float64, by a scan in log2(T) passes; garbage past a column's length."""
        rows, runs = block.num_rows, block.runs
        returns = block.reward[:rows].astype(np.float64)
        decay = np.where(runs.begins, 0.0, gamma)
        returns[0] += gamma * self.open_returns.of(runs.ids[0])
        span = 1
        while span < rows:
            # Row t holds its return over the last `span` rows, and what an earlier one is still worth there.
            returns[span:] += decay[span:] * returns[:-span]
            decay[span:] = decay[span:] * decay[:-span]
            span *= 2
        self.open_returns.keep(runs, returns[runs.last_rows, runs.filled])
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
