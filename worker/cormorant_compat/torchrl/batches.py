"""What TorchRL's batches have beside ours: flags of the frame itself, counts of steps, ids of padding.

# R rows (environments), T steps
"""

from collections.abc import Hashable, Sequence

import torch
from tensordict import TensorDictBase

from cormorant_compat.torchrl.settings import CollectorSettings, limit
from cormorant_postproc import split_trajectories
from cormorant_worker.collect.batch import frames_of, to_tensordict
from cormorant_worker.collect.block import Block

_IDS = ("collector", "traj_ids")
_VERSION = ("collector", "policy_version")
_MASK = ("collector", "mask")
_FLAGS = ("done", "terminated", "truncated")


def as_torchrls(batch: TensorDictBase, counts: "StepCounts | None", envs: Sequence[Hashable]) -> None:
    """Give a batch `[R, T]` what TorchRL's have beside ours; in place. `envs` as for `StepCounts.add`."""
    add_root_flags(batch)
    lift_info(batch)
    if counts is not None:
        counts.add(batch, envs)


def add_root_flags(batch: TensorDictBase) -> None:
    """`done`, `terminated` and `truncated` of the frames themselves `[*, T, 1]`: False, as nothing is stepped from an
    end; in place.
    """
    shape = batch["next", "done"].shape
    for name in _FLAGS:
        batch[name] = torch.zeros(shape, dtype=torch.bool, device=batch.device)


def lift_info(batch: TensorDictBase) -> None:
    """Declared keys of info lie at the root of `next`, where TorchRL's info readers put them; in place."""
    following = batch["next"]
    if "info" not in following.keys():  # noqa: SIM118  # a TensorDict, not a dict
        return
    info = following.pop("info")
    for key in info.keys():  # noqa: SIM118
        if key in following.keys():  # noqa: SIM118
            raise ValueError(f"info has {key}, and next has a {key} of its own; rename it in a wrapper")
        following[key] = info[key]


def mark_padding(batch: TensorDictBase) -> None:
    """Padding has trajectory id -1, as TorchRL's has; in place."""
    if _MASK in batch.keys(True):
        batch[_IDS].masked_fill_(~batch[_MASK], -1)


def add_versions(batch: TensorDictBase) -> None:
    """The version that acted, where TorchRL has it: `policy_version` and `("next", "policy_version")`."""
    batch["policy_version"] = batch["next", "policy_version"] = batch[_VERSION]


def drop_ids(batch: TensorDictBase, *, keep_versions: bool) -> None:
    """Leave out trajectory ids, and versions unless they are wanted; the mask of padding stays. In place."""
    del batch[_IDS]
    if not keep_versions:
        del batch[_VERSION]
    if not batch["collector"].keys():
        del batch["collector"]


class StepCounts:
    """`step_count` of each frame `[R, T, 1]` int64: steps since its trajectory began, over any number of batches."""

    def __init__(self) -> None:
        self._following: dict[Hashable, tuple[int, int]] = {}
        """By environment: its last trajectory, and the count that its next frame has."""

    def add(self, batch: TensorDictBase, envs: Sequence[Hashable]) -> None:
        """Count; in place.

        Args:
            batch: `[R, T]`, its rows go on where those of the same environments' last batch ended.
            envs: by row: which environment it is.
        """
        if "step_count" in batch.keys():  # noqa: SIM118  # a TensorDict, not a dict
            return  # the environment counts itself
        ids = batch[_IDS]
        step = torch.arange(ids.shape[1]).expand_as(ids)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        first = torch.where(begins, step, 0).cummax(1).values
        known = [self._following.get(env, (-1, 0)) for env in envs]
        begun = [count if int(row[0]) == of else 0 for (of, count), row in zip(known, ids, strict=True)]
        goes_on = torch.tensor(begun).unsqueeze(-1)
        counts = step - first + torch.where(first == 0, goes_on, 0)
        lengths = batch[_MASK].sum(1) if _MASK in batch.keys(True) else torch.full((len(ids),), ids.shape[1])
        for env, row, length in zip(envs, range(len(ids)), lengths.tolist(), strict=True):
            if length:
                self._following[env] = int(ids[row, length - 1]), int(counts[row, length - 1]) + 1
        batch["step_count"] = counts.unsqueeze(-1)
        batch["next", "step_count"] = counts.unsqueeze(-1) + 1


def split(batch: TensorDictBase) -> TensorDictBase:
    found: TensorDictBase = split_trajectories(batch)
    return found


def truncate_last(batch: TensorDictBase) -> None:
    """Mark the last frame of each row `[B, T]` done, and truncated unless it terminated; in place."""
    following = batch["next"]
    rows, steps = batch.shape
    last = torch.full((rows,), steps - 1)
    if ("collector", "mask") in batch.keys(True):
        last = (batch["collector", "mask"].sum(-1) - 1).clamp_min(0)
    at = torch.arange(rows), last
    following["truncated"][at] |= ~following["terminated"][at]
    following["done"][at] = True


class StoreInBuffer:
    """Called in the worker with each batch; does with it what the collector would do here. Pickled for it."""

    def __init__(self, settings: CollectorSettings) -> None:
        self._buffer = settings.replay_buffer
        self._truncates = settings.set_truncated
        self._splits = settings.split_trajs
        self._postproc = settings.postproc
        self._counts = StepCounts() if limit(settings.max_frames_per_traj) else None

    def __call__(self, block: Block) -> None:
        batch: TensorDictBase = to_tensordict(block, copy=True)
        as_torchrls(batch, self._counts, range(len(batch)))
        if self._truncates:
            truncate_last(batch)
        if self._splits:
            batch = split(batch)
        self._buffer.extend(frames_of(batch if self._postproc is None else self._postproc(batch)))
