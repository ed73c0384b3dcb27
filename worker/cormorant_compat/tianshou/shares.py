"""Exactly n whole episodes, without favouring short ones: each environment's share of them is fixed beforehand.

An environment stops right after its last episode, so nothing is stepped in vain. Environments that come back as they
are ready cannot be restarted; there an episode that is under way at the beginning is played to its end and left out.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from cormorant_compat.tianshou.watched import WrappedEnvGroup
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.env_group import EnvGroup
from cormorant_worker.collect.trajectories import Trajectories
from cormorant_worker.errors import EnvError
from cormorant_worker.spaces import Array

if TYPE_CHECKING:
    from cormorant_worker.collect.collector import Collector

_ROWS = 64


def play_episodes(collector: "Collector", num_episodes: int, *, is_open: Array, max_frames: int) -> Iterator[Block]:
    """Fill the same block again and again until every environment has played its share.

    Args:
        collector: whose groups step.
        num_episodes: over all environments; where there are fewer, the last environments play none.
        is_open: [B] bool, environments whose first episode is under way and is played beside their share.
        max_frames: of one environment, in which it must have played its share.

    Yields:
        A sealed block, valid until the next one: the caller reads it before it goes on.

    Raises:
        EnvError: an environment did not end its episodes within `max_frames`.
    """
    envs = collector.num_envs
    share = np.full(envs, num_episodes // envs, dtype=np.int64)
    share[: num_episodes % envs] += 1
    left = share + is_open
    frames = np.zeros(envs, dtype=np.int64)
    block = Block(collector.layout(_ROWS))
    env_groups = collector.env_groups
    try:
        while (left > 0).any():
            if frames.max() >= max_frames:
                late = int(frames.argmax())
                raise EnvError(
                    f"environment {late} has {left[late]} of {share[late]} episodes left after {frames[late]:,} "
                    "frames; give the environments a time limit"
                )
            quota, counters = _begin(collector, env_groups, left)
            collector.env_groups = [counter.as_group() for counter in counters]
            collector.fill_columns(block, quota)
            collector.env_groups = env_groups
            frames += block.lengths
            lost = collector.trajectories.lost
            ended = block.end_columns[: block.num_ends]
            if lost:
                ids = block.traj_ids[block.end_rows[: block.num_ends], ended]
                ended = ended[~np.isin(ids, list(lost))]
            np.subtract.at(left, ended, 1)
            yield block
    finally:
        collector.env_groups = env_groups


def _begin(collector: "Collector", env_groups: list[EnvGroup], left: Array) -> tuple[Array, list["_Counting"]]:
    """What each column is to fill of the next block, and groups that stop where its share ends."""
    quota = np.where(left > 0, _ROWS, 0)
    counters = []
    first = 0
    for env_group in env_groups:
        columns = slice(first, first + env_group.env.num_envs)
        first = columns.stop
        missing = left[columns].copy()
        for column, frames in env_group.ends_ahead():
            # It is in the ring already, ahead of what was handed over.
            missing[column] -= 1
            if missing[column] == 0:
                quota[columns.start + column] = min(_ROWS, frames)
        counters.append(_Counting(env_group, collector.trajectories, columns, missing))
    return quota, counters


class _Counting(WrappedEnvGroup):
    """Stops a column when it has ended its share."""

    def __init__(self, env_group: EnvGroup, trajectories: Trajectories, columns: slice, missing: Array) -> None:
        super().__init__(env_group)
        self._trajectories = trajectories
        self._ids = trajectories.ids[columns]
        self._missing = missing

    def land(self) -> int:
        before = self._ids.copy()
        landed = self.inner.land()
        ended = np.flatnonzero(before != self._ids)
        if len(ended):
            lost = self._trajectories.lost
            ended = np.array([column for column in ended.tolist() if int(before[column]) not in lost], dtype=np.int64)
            self._missing[ended] -= 1
            if len(done := ended[self._missing[ended] == 0]):
                self.inner.stop(done)
        return landed
