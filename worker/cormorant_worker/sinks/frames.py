"""A block as one Arrow record batch, one row a frame, and back. Called by the shard writer and by readers.

Rows are time-major: (step 0, env 0), (step 0, env 1), ... A full block is not copied: its arrays are the columns.

# T steps, B envs, n frames, k frames whose `next` is stored apart
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cormorant_worker.collect.block import Block
from cormorant_worker.collect.runs import Carry
from cormorant_worker.sinks.schema import KINDS, NEXT, FrameSchema, column_name, next_type, to_arrow, to_numpy
from cormorant_worker.spaces import Array, Arrays, Leaf

if TYPE_CHECKING:
    from tensordict import TensorDict


class FrameEncoder:
    """Turns the blocks of one collector into record batches, and counts the steps of its trajectories."""

    def __init__(self, schema: FrameSchema, num_envs: int, arrow_schema: Any) -> None:
        """Encode blocks of `num_envs` columns.

        Args:
            num_envs: B.
            arrow_schema: what `schema.arrow` returned.
        """
        self._schema = schema
        self._arrow = arrow_schema
        self._envs = num_envs
        self._env_TB = np.empty((0, num_envs), dtype=np.int32)
        self.open_steps = Carry(num_envs)
        """Frames of the open trajectories that were stored before."""
        self._next_types = [next_type(leaf) for leaf in schema.carried]

    def encode(self, block: Block) -> Any:
        """The block's frames as a pyarrow.RecordBatch that looks into the block's memory."""
        rows, envs = block.num_rows, self._envs
        if rows > len(self._env_TB):
            self._env_TB = np.tile(np.arange(envs, dtype=np.int32), (rows, 1))
        select = _selector(block)
        columns = [to_arrow(leaf, select(values)) for leaf, values in self._schema.arrays_of(block)]
        plain = {
            "reward": block.reward,
            "terminated": block.terminated,
            "truncated": block.truncated,
            "traj_id": block.traj_ids,
            "step": self._count_steps(block),
            "env": self._env_TB,
            "policy_version": block.policy_version,
            "is_init": block.is_init,
        }
        columns += [pa.array(select(plain[name])) for name, _ in self._schema.plain]
        columns += self._following(block, select)
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def _count_steps(self, block: Block) -> Array:
        """[T, B] int32, the n-th frame of its trajectory, from 0. Padding holds anything."""
        runs = block.runs
        t_T1 = np.arange(block.num_rows, dtype=np.int32)[:, None]
        start_TB = np.where(runs.begins, t_T1, np.iinfo(np.int32).min)
        start_TB[0] = -self.open_steps.of(runs.ids[0])
        np.maximum.accumulate(start_TB, axis=0, out=start_TB)
        step_TB: Array = np.subtract(t_T1, start_TB, out=start_TB)
        self.open_steps.keep(runs, step_TB[runs.last_rows, runs.filled] + 1)
        return step_TB

    def _following(self, block: Block, select: Callable[[Array], Array]) -> list[Any]:
        """The `next.` columns: the true last values at ends, what followed a column's last frame elsewhere."""
        envs, ends = self._envs, slice(0, block.num_ends)
        columns, rows = block.runs.filled, block.runs.last_rows + 1
        # At the same place an end goes before what the column was carried on with: unique keeps the first.
        places, order = np.unique(
            np.concatenate([block.end_rows[ends] * envs + block.end_columns[ends], (rows - 1) * envs + columns]),
            return_index=True,
        )
        has_TB = np.zeros((block.num_rows, envs), dtype=np.int32)
        has_TB.reshape(-1)[places] = 1
        has_n = select(has_TB)
        offsets = np.zeros(len(has_n) + 1, dtype=np.int32)
        np.cumsum(has_n, dtype=np.int32, out=offsets[1:])
        arrow_offsets = pa.array(offsets)
        found = []
        for leaf, kind, carried, final in zip(
            self._schema.carried,
            self._next_types,
            block.observation + block.states,
            block.final + block.final_states,
            strict=True,
        ):
            values = np.concatenate([final[ends], carried[rows, columns]])[order]
            found.append(pa.ListArray.from_arrays(arrow_offsets, to_arrow(leaf, values), type=kind))
        return found


def _selector(block: Block) -> Callable[[Array], Array]:
    """Chooses those of a block's T x B places that hold frames, [T or T+1, B, ...] -> [n, ...]: all, the first n, or
    those under a mask. A view unless the frames lie scattered.
    """
    rows, places, frames, mask_TB = block.num_rows, block.num_rows * len(block.lengths), block.num_frames, block.mask
    if mask_TB is not None and not mask_TB.reshape(-1)[:frames].all():
        return lambda values: values[:rows][mask_TB]
    return lambda values: values[:rows].reshape((places, *values.shape[2:]))[:frames]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """The frames of one batch, read back: n rows, time-major. Arrays may be read-only views of the shard."""

    schema: FrameSchema
    part: str
    """The worker attempt that wrote them, `<group>-<index>-<attempt>`."""
    observation: Arrays
    """[n, ...] a leaf."""
    action: Arrays
    outputs: Arrays
    states: Arrays
    info: Arrays
    tasks: Arrays
    """[n] int64 of the one leaf that there is with variants."""
    reward: Array
    """[n] float32."""
    terminated: Array
    truncated: Array
    traj_id: Array
    """[n] int64."""
    step: Array
    """[n] int32, the n-th frame of its trajectory, from 0."""
    env: Array
    """[n] int32, the environment's column."""
    policy_version: Array
    """[n] int64."""
    is_init: Array
    """[n] bool; empty for policies without recurrent state."""
    next_rows: Array
    """[k] ascending rows whose `next` is stored apart."""
    next_observation: Arrays
    """[k, ...] a leaf, for `next_rows`."""
    next_states: Arrays
    """[k, ...] each state, for `next_rows`."""

    def __len__(self) -> int:
        return len(self.reward)

    def runs(self) -> tuple[Array, Array]:
        """Rows by column, then time; and the positions [S] in that order where another trajectory or column begins."""
        order = np.argsort(self.env, kind="stable")
        env, traj_id = self.env[order], self.traj_id[order]
        return order, np.flatnonzero(np.r_[True, (env[1:] != env[:-1]) | (traj_id[1:] != traj_id[:-1])])

    def following(self) -> tuple[Arrays, Arrays]:
        """What each frame led to: observations and states, [n, ...] a leaf, copied."""
        order = np.argsort(self.env, kind="stable")
        after = np.zeros(len(self), dtype=np.int64)
        after[order[:-1]] = order[1:]

        def follow(values: Array, apart: Array) -> Array:
            found: Array = values[after]
            found[self.next_rows] = apart
            return found

        return (
            tuple(follow(v, a) for v, a in zip(self.observation, self.next_observation, strict=True)),
            tuple(follow(v, a) for v, a in zip(self.states, self.next_states, strict=True)),
        )

    def to_tensordict(self) -> "TensorDict":
        """The frames as a TensorDict `[n]` with the keys of a batch: see `batch.to_tensordict`. Always a copy."""
        # Verifying and exporting a dataset need no torch and start faster without it.
        import torch
        from tensordict import TensorDict

        next_observation, next_states = self.following()
        root: dict[Any, Any] = {}
        roots = dict.fromkeys(self.schema.info, ("next",)) | dict.fromkeys(self.schema.tasks, ("collector",))
        for leaf, value in self.schema.arrays_of(self):
            root[*roots.get(leaf, ()), *leaf.key] = torch.from_numpy(value.copy())
        for leaf, value in zip(self.schema.carried, next_observation + next_states, strict=True):
            root["next", *leaf.key] = torch.from_numpy(value)
        if self.schema.states:
            root["is_init",] = torch.from_numpy(self.is_init.copy()).unsqueeze(-1)
        flags = {"reward": self.reward, "terminated": self.terminated, "truncated": self.truncated}
        flags["done"] = self.terminated | self.truncated
        root |= {("next", name): torch.from_numpy(value.copy()).unsqueeze(-1) for name, value in flags.items()}
        root["collector", "traj_ids"] = torch.from_numpy(self.traj_id.copy())
        root["collector", "policy_version"] = torch.from_numpy(self.policy_version.copy())
        frames = TensorDict({}, batch_size=[len(self)])
        for key, value in root.items():
            frames.set(key, value)
        return frames


def decode(schema: FrameSchema, part: str, batch: Any) -> Frames:
    """Read a record batch (pyarrow.RecordBatch) that `FrameEncoder.encode` made, without copying its leaves."""

    def read(leaves: tuple[Leaf, ...]) -> Iterator[Array]:
        return (to_numpy(leaf, batch.column(column_name(leaf))) for leaf in leaves)

    def read_next(leaves: tuple[Leaf, ...]) -> Iterator[Array]:
        return (to_numpy(leaf, batch.column(NEXT + column_name(leaf)).flatten()) for leaf in leaves)

    def plain(name: str) -> Array:
        values: Array = batch.column(name).to_numpy(zero_copy_only=False)
        return values

    offsets = batch.column(NEXT + column_name(schema.carried[0])).offsets.to_numpy()
    columns: dict[str, Any] = {name: tuple(read(getattr(schema, name))) for name in KINDS.values()}
    columns["is_init"] = np.zeros(0, dtype=np.bool_)
    columns |= {name: plain(name) for name, _ in schema.plain}
    return Frames(
        schema=schema,
        part=part,
        **columns,
        next_rows=np.flatnonzero(np.diff(offsets)),
        next_observation=tuple(read_next(schema.observation)),
        next_states=tuple(read_next(schema.states)),
    )
