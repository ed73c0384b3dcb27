"""Whole episodes out of batches: TorchRL's `trajs_per_batch`."""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import torch
from tensordict import TensorDictBase


class EpisodePool:
    """Keeps the open trajectories, and gives N ended ones at a time."""

    def __init__(self, num_episodes: int) -> None:
        self._num_episodes = num_episodes
        self._open: dict[int, list[TensorDictBase]] = {}
        self._ended: deque[TensorDictBase] = deque()

    def add(self, batch: TensorDictBase) -> Iterator[TensorDictBase]:
        """Take a batch `[R, T]`. Yields `[N, longest]`, padded with zeros and masked, as often as there are N."""
        has_mask = ("collector", "mask") in batch.keys(True)
        for row in batch.unbind(0):
            filled = row[row["collector", "mask"]].exclude(("collector", "mask")) if has_mask else row
            if not len(filled):
                continue
            ids = filled["collector", "traj_ids"]
            cuts = [0, *(torch.nonzero(ids[1:] != ids[:-1]).flatten() + 1).tolist(), len(ids)]
            for first, stop in pairwise(cuts):
                piece = filled[first:stop]
                number = int(ids[first])
                self._open.setdefault(number, []).append(piece)
                if bool(piece["next", "done"][-1].any()):
                    self._ended.append(torch.cat(self._open.pop(number)))
        while len(self._ended) >= self._num_episodes:
            yield self._padded(self._num_episodes)

    def rest(self) -> TensorDictBase | None:
        """Those that have ended and are fewer than N; None where there are none. Open ones are given up."""
        self._open.clear()
        return self._padded(len(self._ended)) if self._ended else None

    def _padded(self, count: int) -> TensorDictBase:
        episodes = [self._ended.popleft() for _ in range(count)]
        longest = max(map(len, episodes))
        rows = []
        for episode in episodes:
            whole = episode.copy()
            whole["collector"] = episode["collector"].copy()
            whole["collector", "mask"] = torch.ones(len(episode), dtype=torch.bool)
            if len(episode) < longest:
                padding = whole[:1].expand(longest - len(episode)).clone().zero_()
                whole = torch.cat([whole, padding])
            rows.append(whole)
        stacked: TensorDictBase = torch.stack(rows)
        stacked.names = [None, "time"]
        return stacked
