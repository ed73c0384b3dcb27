"""Converts a block to one Arrow record batch, one row per frame, and back. Called by the shard writer and by readers.

Rows are time-major: (step 0, env 0), (step 0, env 1), ... A full block is not copied: its arrays are the columns.

# T steps, B envs, n frames, k frames whose `next` is stored separately
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cormorant_worker.collect.block import Block, Carry
from cormorant_worker.errors import DatasetCorrupt
from cormorant_worker.sinks.schema import (
    KINDS,
    NEXT,
    FrameSchema,
    column_name,
    next_type,
    plain_to_arrow,
    to_arrow,
    to_numpy,
)
from cormorant_worker.spaces import Array, Arrays, Key, put_nested, writable

if TYPE_CHECKING:
    from tensordict import TensorDict


class FrameEncoder:
    """Turns the blocks of one collector into record batches, and counts the steps of its trajectories."""

    def __init__(self, schema: FrameSchema, num_envs: int, arrow_schema: Any) -> None:
        """Encode blocks of `num_envs` columns, B, in the schema that `schema.arrow` returned."""
        self._schema = schema
        self._arrow = arrow_schema
        self._envs = num_envs
        self._env_TB = np.empty((0, num_envs), dtype=np.int32)
        self.open_steps = Carry(num_envs)
        """Frames of the open trajectories that were stored before."""
        self._next_types = [next_type(leaf) for leaf in schema.carried]

    def encode(self, block: Block) -> Any:
        """The block's frames as a pyarrow.RecordBatch that views the block's memory."""
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
        columns += [plain_to_arrow(select(plain[name])) for name, _ in self._schema.plain]
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
        arrow_offsets = plain_to_arrow(offsets)
        lists = []
        for leaf, kind, carried, final in zip(
            self._schema.carried,
            self._next_types,
            block.observation + block.states,
            block.final + block.final_states,
            strict=True,
        ):
            values = np.concatenate([final[ends], carried[rows, columns]])[order]
            lists.append(pa.ListArray.from_arrays(arrow_offsets, to_arrow(leaf, values), type=kind))
        return lists


def _selector(block: Block) -> Callable[[Array], Array]:
    """Chooses a block's places with frames, [T or T+1, B, ...] -> [n, ...]: a view unless they lie scattered."""
    rows, places, frames, mask_TB = block.num_rows, block.num_rows * len(block.lengths), block.num_frames, block.mask
    if mask_TB is not None and not mask_TB.reshape(-1)[:frames].all():
        return lambda values: values[:rows][mask_TB]
    return lambda values: values[:rows].reshape((places, *values.shape[2:]))[:frames]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """The frames of one batch, time-major, or of one trajectory. n rows; arrays may be read-only views of the shard."""

    schema: FrameSchema
    part: str
    """The worker attempt that wrote them, `<group>-<index>-<attempt>`."""
    observation: Arrays
    """[n, ...] per leaf."""
    action: Arrays
    outputs: Arrays
    states: Arrays
    info: Arrays
    tasks: Arrays
    """[n] int64 task ids, as a single leaf; empty without variants."""
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
    """[k] ascending rows whose `next` is stored separately."""
    next_values: Arrays
    """[k, ...] per leaf of `schema.carried`, for `next_rows`."""

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def is_cut(self) -> bool:
        """For a trajectory's frames: its end is not in the dataset, because the job ended or something died."""
        return not (self.terminated[-1] or self.truncated[-1])

    def by_trajectory(self) -> "Iterator[Frames]":
        """The frames of each trajectory, copied, in the order of their last rows. `next` is kept of the last row."""
        order = np.argsort(self.env, kind="stable")
        env, traj_id = self.env[order], self.traj_id[order]
        runs = np.split(order, np.flatnonzero((env[1:] != env[:-1]) | (traj_id[1:] != traj_id[:-1])) + 1)
        for rows in sorted(runs, key=lambda run: int(run[-1])):
            at = np.flatnonzero(self.next_rows == rows[-1])
            if not len(at):
                raise DatasetCorrupt(
                    f"{self.part}: the observation after frame {rows[-1]} of a batch is missing; "
                    "run `cormorant dataset verify`"
                )
            columns: dict[str, Any] = {name: tuple(a[rows] for a in getattr(self, name)) for name in KINDS.values()}
            columns |= {name: getattr(self, name)[rows] for name, _ in self.schema.plain}
            finals = tuple(values[at] for values in self.next_values)
            yield replace(self, **columns, next_rows=np.array([len(rows) - 1]), next_values=finals)

    def following(self) -> Iterator[Array]:
        """Next values of each frame: [n, ...] of each observation leaf, then of each state, copied."""
        order = np.argsort(self.env, kind="stable")
        after = np.zeros(len(self), dtype=np.int64)
        after[order[:-1]] = order[1:]
        for values, finals in zip(self.observation + self.states, self.next_values, strict=True):
            found: Array = values[after]
            found[self.next_rows] = finals
            yield found

    def to_tensordict(self, keys: Collection[Key] | None = None) -> "TensorDict":
        """A TensorDict `[n]` with the keys of a batch, or those of `FrameSchema.keys` that are given. Observations and
        actions are views of the shard; next observations are copies.
        """
        # Verifying and exporting a dataset need no torch and start faster without it.
        import torch
        from tensordict import TensorDict

        schema = self.schema
        flags = {"reward": self.reward, "terminated": self.terminated, "truncated": self.truncated}
        flags["done"] = self.terminated | self.truncated
        columns = dict(zip(schema.keys(), (value for _, value in schema.arrays_of(self)), strict=False))
        columns |= {("is_init",): self.is_init[:, None]} if schema.states else {}
        columns |= {("next", name): value[:, None] for name, value in flags.items()}
        columns |= {("collector", "traj_ids"): self.traj_id, ("collector", "policy_version"): self.policy_version}
        following = [("next", *leaf.key) for leaf in schema.carried]
        if keys is None or not set(following).isdisjoint(keys):
            columns |= dict(zip(following, self.following(), strict=True))
        root: dict[str, Any] = {}
        for key, value in columns.items():
            if keys is None or key in keys:
                put_nested(root, key, torch.from_numpy(writable(value)))
        return TensorDict(root, batch_size=[len(self)])


def decode(schema: FrameSchema, part: str, batch: Any, *, marks: str = "") -> Frames:
    """Read a record batch without copying its leaves. `marks`: the `next.` column to read which rows have one."""
    offsets = batch.column(marks or NEXT + column_name(schema.carried[0])).offsets.to_numpy()
    columns: dict[str, Any] = {
        name: tuple(to_numpy(leaf, batch.column(column_name(leaf))) for leaf in getattr(schema, name))
        for name in KINDS.values()
    }
    columns["is_init"] = np.zeros(0, dtype=np.bool_)
    columns |= {name: batch.column(name).to_numpy(zero_copy_only=False) for name, _ in schema.plain}
    return Frames(
        schema=schema,
        part=part,
        **columns,
        next_rows=np.flatnonzero(np.diff(offsets)),
        next_values=tuple(to_numpy(leaf, batch.column(NEXT + column_name(leaf)).flatten()) for leaf in schema.carried),
    )


def joined(pieces: Sequence[Frames]) -> Frames:
    """One trajectory of its pieces, under the name of the first one's part."""
    if len(pieces) == 1:
        return pieces[0]
    columns: dict[str, Any] = {}
    for name in KINDS.values():
        leaves = zip(*(getattr(piece, name) for piece in pieces), strict=True)
        columns[name] = tuple(np.concatenate(series) for series in leaves)
    for name, _ in pieces[0].schema.plain:
        columns[name] = np.concatenate([getattr(piece, name) for piece in pieces])
    last_row = np.array([sum(map(len, pieces)) - 1])
    return replace(pieces[0], **columns, next_rows=last_row, next_values=pieces[-1].next_values)
