"""Whole episodes out of batches: TorchRL's `trajs_per_batch`."""

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch
from tensordict import TensorDictBase

from cormorant_worker.collect.batch import stack_workers, with_mask


class EpisodePool:
    """Keeps the open trajectory of each environment, and gives N ended ones at a time."""

    def __init__(self, num_episodes: int) -> None:
        self._num_episodes = num_episodes
        self._open: dict[Hashable, tuple[int, list[TensorDictBase]]] = {}
        """By environment: its trajectory's id, and the pieces so far."""
        self._ended: deque[TensorDictBase] = deque()
        self.complete: deque[TensorDictBase] = deque()
        """Batches `[N, longest]`, padded with zeros and masked."""
        self.given_up = 0
        """Trajectories that begun and never ended: their collector died, or began its next batch with new episodes."""

    def add(self, batch: TensorDictBase, envs: Sequence[Hashable]) -> None:
        """Take a batch `[R, T]`.

        Args:
            batch: its rows go on where those of the same environments' last batch ended.
            envs: by row: which environment it is.
        """
        has_mask = ("collector", "mask") in batch.keys(True)
        for env, row in zip(envs, batch.unbind(0), strict=True):
            filled = row[row["collector", "mask"]].exclude(("collector", "mask")) if has_mask else row
            if not len(filled):
                continue
            ids = filled["collector", "traj_ids"]
            cuts = [0, *(torch.nonzero(ids[1:] != ids[:-1]).flatten() + 1).tolist(), len(ids)]
            for first, stop in pairwise(cuts):
                self._append(env, int(ids[first]), filled[first:stop])
        while len(self._ended) >= self._num_episodes:
            self.complete.append(self._padded(self._num_episodes))

    def _append(self, env: Hashable, number: int, piece: TensorDictBase) -> None:
        known, pieces = self._open.pop(env, (number, []))
        if known != number:
            self.given_up += 1
            pieces = []
        pieces.append(piece)
        if bool(piece["next", "done"][-1].any()):
            self._ended.append(torch.cat(pieces))
        else:
            self._open[env] = number, pieces

    def clear(self) -> None:
        """Forget everything: what comes next goes on with nothing that is here."""
        self.given_up += len(self._open)
        self._open.clear()
        self._ended.clear()
        self.complete.clear()

    def finish(self) -> bool:
        """Complete a last batch of those that have ended, if there are any: fewer than N. Open ones are given up."""
        self.given_up += len(self._open)
        self._open.clear()
        if self._ended:
            self.complete.append(self._padded(len(self._ended)))
        return bool(self.complete)

    def _padded(self, count: int) -> TensorDictBase:
        return stack_workers([with_mask(self._ended.popleft().unsqueeze(0)) for _ in range(count)])
