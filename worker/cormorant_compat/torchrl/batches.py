"""Keys of TorchRL's batches beside ours: flags of the frame itself, counts of steps, ids of padding, whole episodes.

# R rows (environments), T steps
"""

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDictBase

from cormorant_compat.arguments import room_of
from cormorant_compat.torchrl.settings import MakerKeywords
from cormorant_postproc import frames_of, split_trajectories
from cormorant_postproc.pieces import first_step
from cormorant_worker.collect.batch import stack_workers, to_tensordict, with_mask
from cormorant_worker.collect.block import Block

_IDS = ("collector", "traj_ids")
_MASK = ("collector", "mask")
FLAGS = ("done", "terminated", "truncated")
REWARDS = "_rewards"
"""In `next`, as collectors hand it over: rewards that are not one number under "reward", where TorchRL has them."""


def add_torchrls(
    batch: TensorDictBase, counts: "StepCounts | None", envs: Sequence[Hashable], *, is_compact: bool
) -> None:
    """Give a batch `[R, T]` what TorchRL's have beside ours: flags of the frames themselves, declared info at the root
    of `next`, where TorchRL's info readers put it, and counts of steps. In place; `envs` as for `StepCounts.add`.
    With `is_compact`, `next` has no observations and states.
    """
    following = batch["next"]
    group_keys = [key for key in following.keys(True, True) if isinstance(key, tuple) and key[-1] == "done"]
    if REWARDS in following.keys():  # noqa: SIM118  # a TensorDict, not a dict
        del following["reward"]
        rewards = following.pop(REWARDS)
        group_keys += [key for key in rewards.keys(True, True) if isinstance(key, tuple)]
        following.update(rewards)
    for key in group_keys:
        # What belongs to a group of agents has their dimension in its batch size.
        for place in (batch, following):
            if (group := place.get(key[:-1], None)) is not None:
                group.batch_size = following[key].shape[:-1]
    for name in FLAGS:
        # Nothing is stepped from an end.
        batch[name] = torch.zeros(following["done"].shape, dtype=torch.bool, device=batch.device)
    if "info" in following.keys():  # noqa: SIM118  # a TensorDict, not a dict
        for key, values in following.pop("info").items():
            if key in following.keys():  # noqa: SIM118
                raise ValueError(f"info has {key}, and next has a {key} of its own; rename it in a wrapper")
            following[key] = values
    if counts is not None:
        counts.add(batch, envs)
    if is_compact:
        carried = [key for key in batch.keys(True, True) if (key if isinstance(key, str) else key[-1]) not in FLAGS]
        batch["next"] = following.exclude(*carried)


def mark_padding(batch: TensorDictBase) -> None:
    """Padding has trajectory id -1, as TorchRL's has; in place."""
    if _MASK in batch.keys(True):
        batch[_IDS].masked_fill_(~batch[_MASK], -1)


class StepCounts:
    """`step_count` of each frame `[R, T, 1]` int64: steps since its trajectory began, over any number of batches."""

    def __init__(self) -> None:
        self.following: dict[Hashable, tuple[int, int]] = {}
        """By environment: its last trajectory, and the count that its next frame has."""

    def add(self, batch: TensorDictBase, envs: Sequence[Hashable]) -> None:
        """Count, in place. The rows of a batch `[R, T]` go on where those of the same `envs`, by row, ended."""
        if "step_count" in batch.keys():  # noqa: SIM118  # a TensorDict, not a dict
            return  # the environment counts itself
        ids = batch[_IDS]
        first = first_step(ids)
        known = [self.following.get(env, (-1, 0)) for env in envs]
        begun = [count if int(row[0]) == of else 0 for (of, count), row in zip(known, ids, strict=True)]
        goes_on = torch.tensor(begun).unsqueeze(-1)
        counts = torch.arange(ids.shape[1]) - first + torch.where(first == 0, goes_on, 0)
        lengths = batch[_MASK].sum(1) if _MASK in batch.keys(True) else torch.full((len(ids),), ids.shape[1])
        for env, row, length in zip(envs, range(len(ids)), lengths.tolist(), strict=True):
            if length:
                self.following[env] = int(ids[row, length - 1]), int(counts[row, length - 1]) + 1
        batch["step_count"] = counts.unsqueeze(-1)
        batch["next", "step_count"] = counts.unsqueeze(-1) + 1


class EpisodePool:
    """Keeps the open trajectory of each environment, and gives N ended ones at a time."""

    def __init__(self, settings: MakerKeywords) -> None:
        self._num_episodes = settings["trajs_per_batch"] or 1
        self._is_padded = settings["traj_format"] != "cat"
        self._open: dict[Hashable, tuple[int, list[TensorDictBase]]] = {}
        """By environment: its trajectory's id, and the pieces so far."""
        self._ended: deque[TensorDictBase] = deque()
        self.given_up = 0
        """Trajectories that begun and never ended: their collector died, or began its next batch with new episodes."""

    def add(self, batch: TensorDictBase, envs: Sequence[Hashable]) -> None:
        """Take a batch `[R, T]`, whose rows go on where those of the same `envs`, by row, ended."""
        has_mask = _MASK in batch.keys(True)
        for env, row in zip(envs, batch.unbind(0), strict=True):
            filled = row[row[_MASK]].exclude(_MASK) if has_mask else row
            if not len(filled):
                continue
            ids = filled[_IDS]
            cuts = [0, *(torch.nonzero(ids[1:] != ids[:-1]).flatten() + 1).tolist(), len(ids)]
            for first, stop in pairwise(cuts):
                number, piece = int(ids[first]), filled[first:stop]
                known, pieces = self._open.pop(env, (number, []))
                if known != number:
                    self.given_up += 1
                    pieces = []
                if bool(piece["next", "done"][-1].any()):
                    self._ended.append(torch.cat([*pieces, piece]))
                else:
                    # A copy: the piece itself would keep the whole batch.
                    self._open[env] = number, [*pieces, piece.clone()]

    def clear(self) -> None:
        """Forget everything: what comes next continues with nothing that is here."""
        self.given_up += len(self._open)
        self._open.clear()
        self._ended.clear()

    def take(self, *, is_last: bool = False) -> TensorDictBase | None:
        """N episodes, None if fewer have ended: `[N, longest]`, padded with zeros and masked, or one after the other,
        `[frames]`. `is_last`: nothing comes any more, so fewer will do, and open ones are given up.
        """
        if is_last:
            self.given_up += len(self._open)
            self._open.clear()
        elif len(self._ended) < self._num_episodes:
            return None
        episodes = [self._ended.popleft() for _ in range(min(self._num_episodes, len(self._ended)))]
        if not episodes:
            return None
        if not self._is_padded:
            return torch.cat(episodes)
        return stack_workers([with_mask(episode.unsqueeze(0)) for episode in episodes])


def extend_buffer(buffer: Any, batch: TensorDictBase) -> None:
    """Extend a replay buffer with a batch `[..., T]`: with single frames where its storage has one dimension, else with
    as many dimensions as it has, the leading ones in one.
    """
    num_dims = room_of(buffer)[1]
    if num_dims > 1:
        batch = batch[(None,) * (num_dims - batch.ndim)]
        batch = batch.flatten(0, batch.ndim - num_dims)
    buffer.extend(batch if num_dims > 1 else frames_of(batch))


class StoreInBuffer:
    """Called in the worker with each batch; does with it what the collector would do here. Pickled for it."""

    def __init__(self, settings: MakerKeywords) -> None:
        buffer: Any = settings["replay_buffer"]
        # TorchRL's RayReplayBuffer cannot be pickled; its clients can.
        self._buffer = buffer.client() if callable(getattr(buffer, "client", None)) else buffer
        self._splits = settings["split_trajs"]
        self._postproc = settings["postproc"]
        self._is_compact = settings["compact_obs"]
        self._counts = StepCounts() if settings["max_frames_per_traj"] else None

    def __call__(self, block: Block) -> None:
        batch: TensorDictBase = to_tensordict(block, copy=True)
        add_torchrls(batch, self._counts, range(len(batch)), is_compact=self._is_compact)
        if self._splits:
            batch = split_trajectories(batch)
        extend_buffer(self._buffer, batch if self._postproc is None else self._postproc(batch))
