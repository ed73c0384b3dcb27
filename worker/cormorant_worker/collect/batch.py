"""A sealed block as a TensorDict `[B, T]` with TorchRL's keys. Called where batches are handed to a learner.

# B envs, T steps
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from cormorant_postproc.pieces import signed
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.rollout import DeviceRows
from cormorant_worker.spaces import Array, Arrays, Leaf, put_nested

_NAMES = [None, "time"]
_MASK = ("collector", "mask")


def to_tensordict(block: Block, *, copy: bool = False, rows_there: DeviceRows | None = None) -> TensorDict:
    """View a sealed block as a batch; with `rows_there`, the rows of a full batch on a device, on that device.

    Every leaf is a view of the block, except `("next", ...)` observations and states of a batch in which a trajectory
    ended: those are copies, because the block stores final values separately. With `copy` nothing is a view of the
    block; `observation` and `("next", "observation")` may still be views of the same memory.

    Returns:
        TensorDict `[B, T]` with `observation`, `action`, the policy's other outputs, recurrent states and `is_init`
        (recurrent policies only), `("next", ...)` with observation, states, `reward` float32 `[B, T, 1]`, `done`,
        `terminated`, `truncated` bool `[B, T, 1]`, `("info", key)` `[B, T, ...]`; with groups of agents each group's
        `reward` and flags `[B, T, n, 1]`, and no `reward` beside them without `teamReward`;
        `("collector", "traj_ids")` and
        `("collector", "policy_version")` int64 `[B, T]`, with variants `("collector", "task_id")` int64 `[B, T]`; and,
        when columns have different lengths,
        `("collector", "mask")` bool `[B, T]`. Where the mask is False every value is zero, except that the
        observation and the recurrent states right after a column's last frame keep the result of that frame.
    """
    layout, rows = block.layout, slice(0, block.num_rows)
    large, device = rows_there or block, None if rows_there is None else rows_there.device

    def own(array: Array | torch.Tensor) -> torch.Tensor:
        tensor = torch.as_tensor(array, device=device)
        return tensor.clone() if copy else tensor

    def taken(array: Array | torch.Tensor) -> torch.Tensor:
        return _env_first(own(array[rows]))

    collector: dict[str, Any] = {}
    if (mask_TB := block.mask) is not None:
        block.blank_padding()
        collector["mask"] = torch.from_numpy(mask_TB).transpose(0, 1)
    collector["traj_ids"], collector["policy_version"] = taken(block.traj_ids), taken(block.policy_version)
    _put(collector, layout.tasks, map(taken, block.tasks))

    root: dict[str, Any] = {"collector": collector}
    # Rows 0..T in one piece, from which both the observation and what followed it are cut.
    observation = [own(a[: block.num_rows + 1]) for a in large.observation]
    states = [own(a[: block.num_rows + 1]) for a in block.states]
    _put(root, layout.observation, (_env_first(a[rows]) for a in observation))
    _put(root, layout.states, (_env_first(a[rows]) for a in states))
    _put(root, (*layout.action, *layout.outputs), map(taken, (*large.action, *large.outputs)))
    if layout.states:
        root["is_init"] = taken(block.is_init).unsqueeze(-1)

    terminated, truncated = taken(block.terminated), taken(block.truncated)
    following: dict[str, Any] = {
        "reward": taken(block.reward).unsqueeze(-1),
        "done": (terminated | truncated).unsqueeze(-1),
        "terminated": terminated.unsqueeze(-1),
        "truncated": truncated.unsqueeze(-1),
    }
    if layout.hides_reward:
        del following["reward"]
    _put(following, layout.observation, _what_followed(block, observation, block.final))
    _put(following, layout.states, _what_followed(block, states, block.final_states))
    _put(following, layout.info, map(taken, large.info))
    root["next"] = following
    return TensorDict(root, batch_size=[layout.num_envs, block.num_rows], names=_NAMES, device=device)


def stack_workers(batches: Sequence[TensorDict]) -> TensorDict:
    """Join one batch of every worker into a copy `[W*B, T]`, in the order given; shorter ones are padded and masked."""
    longest = max(batch.shape[1] for batch in batches)
    if any(batch.shape[1] < longest or _MASK in batch.keys(True) for batch in batches):
        batches = [pad(with_mask(batch), longest) for batch in batches]
    stacked: TensorDict = torch.cat(list(batches), dim=0)
    stacked.names = _NAMES
    return stacked


def with_mask(batch: TensorDict) -> TensorDict:
    """A batch `[B, T]` with a mask, even if it is full."""
    if _MASK in batch.keys(True):
        return batch
    masked: TensorDict = batch.copy().set(_MASK, torch.ones(batch.shape, dtype=torch.bool))
    return masked


def pad(batch: TensorDict, length: int) -> TensorDict:
    """A batch `[B, T]` with zeros, and a mask of False, up to `[B, length]`."""
    if batch.shape[1] == length:
        return batch
    padding = batch[:, :1].expand(batch.shape[0], length - batch.shape[1]).clone().zero_()
    padded: TensorDict = torch.cat([batch, padding], dim=1)
    return padded


def _what_followed(block: Block, carried: Sequence[torch.Tensor], final: Arrays) -> Iterable[torch.Tensor]:
    """The next row of each carried array, and the true last value where a trajectory ended."""
    ends = slice(0, block.num_ends)
    at = torch.from_numpy(block.end_rows[ends]), torch.from_numpy(block.end_columns[ends])
    for values, last in zip(carried, final, strict=True):
        following = values[1 : block.num_rows + 1]
        if block.num_ends:
            following = following.clone()
            signed(following)[at] = signed(torch.as_tensor(last[ends], device=following.device))
        yield _env_first(following)


def _put(target: dict[str, Any], leaves: Sequence[Leaf], values: Iterable[torch.Tensor]) -> None:
    for leaf, value in zip(leaves, values, strict=True):
        put_nested(target, leaf.key, value)


def _env_first(tensor_TB: torch.Tensor) -> torch.Tensor:
    return tensor_TB.transpose(0, 1)
