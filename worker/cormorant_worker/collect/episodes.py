"""Exactly n whole episodes, without favouring short ones.

Stopping when n episodes have ended anywhere counts the quick ones first. Instead every environment is told beforehand
how many of its episodes count (n // B each, the first n % B environments one more), and plays from fresh starts until
it has them. What an environment plays beyond its share is not looked at, nor an episode in which it crashed.
"""

from collections.abc import Set
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict

from cormorant_worker.collect.batch import to_tensordict
from cormorant_worker.collect.block import Block
from cormorant_worker.errors import EnvError
from cormorant_worker.spaces import Array

if TYPE_CHECKING:
    from cormorant_worker.collect.collector import Collector

_CHUNK_ROWS = 64


def collect_episodes(collector: "Collector", num_episodes: int, *, max_frames: int) -> TensorDict:
    """Play `num_episodes` episodes from fresh starts.

    Args:
        collector: its environments are restarted first; their open trajectories end.
        num_episodes: at least 1.
        max_frames: of one environment, in which it must have ended its share.

    Returns:
        TensorDict `[num_episodes, longest]`, padded with zeros, `("collector", "mask")` True on frames; an
        environment's episodes lie side by side, in the order in which they were played.
    """
    envs = collector.num_envs
    shares = np.full(envs, num_episodes // envs, dtype=np.int64)
    shares[: num_episodes % envs] += 1
    missing = shares.copy()
    collector.restart()
    chunks: list[TensorDict] = []
    while (missing > 0).any():
        if len(chunks) * _CHUNK_ROWS >= max_frames:
            late = int(np.flatnonzero(missing > 0)[0])
            raise EnvError(
                f"environment {late} has ended {shares[late] - missing[late]} of {shares[late]} episodes in "
                f"{max_frames:,} frames; set spec.env.maxEpisodeSteps, or allow more with max_frames"
            )
        block = Block(collector.layout(_CHUNK_ROWS))
        collector.fill_columns(block, np.where(missing > 0, _CHUNK_ROWS, 0))
        chunk = to_tensordict(block)
        chunks.append(chunk)
        missing -= _ends(chunk, collector.trajectories.lost).sum(dim=1).numpy()
    return _pad(_episodes(_join(chunks), shares, collector.trajectories.lost))


def _ends(played: TensorDict, lost: Set[int]) -> torch.Tensor:
    """`[B, T]` True where an episode ended by itself, and not with its environment."""
    ids = played["collector", "traj_ids"]
    ends: torch.Tensor = played["next", "done"].squeeze(-1) & ~torch.isin(
        ids, torch.tensor(sorted(lost), dtype=ids.dtype)
    )
    return ends


def _episodes(played: TensorDict, shares: Array, lost: Set[int]) -> list[TensorDict]:
    """Cut `[B, T]` into each environment's first episodes, `[length]` each.

    An episode begins where its trajectory does: one that was lost in a crash before it had a frame in its last chunk
    has no end of its own.
    """
    found = []
    for column, ended, share in zip(played.unbind(0), _ends(played, lost), shares, strict=True):
        ids = column["collector", "traj_ids"]
        for end in ended.nonzero().squeeze(-1)[: int(share)].tolist():
            begin = int((ids[: end + 1] == ids[end]).to(torch.uint8).argmax())
            found.append(column[begin : end + 1])
    return found


def _join(chunks: list[TensorDict]) -> TensorDict:
    # Chunks in which an environment had nothing left to play have a mask, the others have none.
    joined: TensorDict = torch.cat([chunk.exclude(("collector", "mask")) for chunk in chunks], dim=1)
    return joined


def _pad(episodes: list[TensorDict]) -> TensorDict:
    longest = max(episode.shape[0] for episode in episodes)
    padded: TensorDict = episodes[0][:1].expand(len(episodes), longest).clone().zero_()
    mask = torch.zeros(len(episodes), longest, dtype=torch.bool)
    for i, episode in enumerate(episodes):
        padded[i, : episode.shape[0]] = episode
        mask[i, : episode.shape[0]] = True
    padded["collector", "mask"] = mask
    padded.names = [None, "time"]
    return padded
