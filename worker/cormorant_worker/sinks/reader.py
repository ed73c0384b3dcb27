"""Reading datasets, for learners and analysis: `cormorant.read_dataset`.

# N frames of a batch, T frames of a trajectory
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from gymnasium.envs.registration import EnvSpec

from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks.dataset import DatasetPart, StoredDataset, existing_dataset
from cormorant_worker.sinks.schema import FrameSchema, column_name
from cormorant_worker.sinks.shards import ShardRecord
from cormorant_worker.spaces import Key, Space

if TYPE_CHECKING:
    from tensordict import TensorDict

    from cormorant_worker.sinks.frame_stream import FrameStream

_MIXED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """Origin and counts of a dataset."""

    uri: str
    job: str
    """Name of the job that began the dataset."""
    seed: int
    """The job's seed."""
    env: Mapping[str, Any]
    """The environment as the manifest names it, for example `{"envpool": {"taskId": "Pong-v5", "kwargs": {}}}`."""
    env_spec: EnvSpec | None
    """Arguments with which `gymnasium.make` rebuilds the environment; None for EnvPool, vector environments, objects of
    a script, and ids registered with values that JSON has not."""
    observation_space: Space
    """Space of one environment."""
    action_space: Space
    frames: int
    episodes: int
    """Trajectories that ended, terminated or truncated."""
    policy_versions: tuple[int, int] | None
    """Lowest and highest policy version of the frames; None without frames."""
    parts: tuple[str, ...]
    """Worker attempts that wrote it, `<group>-<index>-<attempt>`."""
    size_bytes: int
    """Size of all shards."""


class Dataset:
    """A dataset as it was when opened, without frames that are collected later.

    Read-only, and safe to use in several threads and processes at once.
    """

    def __init__(self, stored: StoredDataset) -> None:
        """Use `read_dataset`."""
        self._opened, self._process = stored, os.getpid()
        self._parts = stored.parts()
        self._schema = stored.description.schema

    @property
    def _stored(self) -> StoredDataset:
        """With connections of this process: those to object stores do not survive a fork."""
        if self._process != os.getpid():
            self._opened, self._process = existing_dataset(self._opened.uri), os.getpid()
        return self._opened

    def __len__(self) -> int:
        """Frames."""
        return sum(part.frames for part in self._parts)

    def __repr__(self) -> str:
        return f"Dataset({self._stored.uri!r}, {len(self):,} frames)"

    @property
    def info(self) -> DatasetInfo:
        """Job, environment and counts of the dataset; reads no frames."""
        description = self._stored.description
        records = [record for part in self._parts for record in part.records]
        versions = [version for r in records for version in (r.min_policy_version, r.max_policy_version)]
        return DatasetInfo(
            uri=self._stored.uri,
            job=description.job,
            seed=description.seed,
            env=description.env,
            env_spec=EnvSpec.from_json(description.env_spec) if description.env_spec else None,
            observation_space=description.observation_space,
            action_space=description.action_space,
            frames=len(self),
            episodes=sum(record.ends for record in records),
            policy_versions=(min(versions), max(versions)) if versions else None,
            parts=tuple(part.name for part in self._parts),
            size_bytes=sum(record.size_bytes for record in records),
        )

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of its frames as a TensorDict, for example `("observation",)` and `("next", "reward")`."""
        return tuple(self._schema.keys())

    def frames(
        self,
        *,
        columns: Sequence[str | Key] | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> "Iterator[TensorDict]":
        """Iterate over every frame once, as TensorDicts `[N]` with the keys of a batch (`docs/reference/batches.md`).

            for frames in dataset.frames(columns=["observation", "action"], batch_size=256, shuffle=True):
                loss = (policy(frames["observation"]) - frames["action"]).square().mean()

        A TensorDict of a local dataset is a view of its files, which are mapped into memory: only
        `("next", "observation")` and compressed columns (images) are copied. Writing into its tensors changes this
        process's copy and never the dataset.

        Args:
            columns: keys to read, a nested key as a tuple; one key chooses all below it. None: all.
            batch_size: N; the last batch may be shorter. None: as stored, or as shuffled.
            shuffle: read the shards in random order, and mix 256 MiB of frames; needs 512 MiB of memory.
            seed: seed of the shuffle; another number gives another order.

        Raises:
            DatasetError: there is no such column, or the batch size is below 1.
            DatasetCorrupt: a shard is missing or cannot be read.
        """
        seeds = (seed,) if shuffle else None
        return self.read(self.choose(columns), 0, len(self), seeds, batch_size=check_batch_size(batch_size))

    def trajectories(self, *, columns: Sequence[str | Key] | None = None) -> "Iterator[TensorDict]":
        """Every trajectory whole, as a TensorDict `[T]`, in the order of `episodes`.

        The last frame of a trajectory that was cut (the job ended, or its worker died) is neither terminated nor
        truncated. Keeps all open trajectories in memory; tensors are copies.

        Args:
            columns: as in `frames`.
        """
        keys = self.choose(columns)
        schema = self._schema.select(keys)
        trajectories = self._stored.iter_trajectories(parts=self._parts, schema=schema)
        return (frames.to_tensordict(keys) for frames in trajectories)

    @cached_property
    def episodes(self) -> "pa.Table":
        """One row per trajectory, as a pyarrow.Table: `dataset.episodes.to_pandas()`, `polars.from_arrow(...)`.

        `part` (the worker attempt), `env` (its column there), `traj_id`, `first_step` (more than 0: the trajectory
        began in an earlier part), `length`, `return` (float64), `terminated` and `truncated` (neither: it was cut),
        `min_policy_version`, `max_policy_version`; with variants `task_id`; and the last value of each scalar
        `info.<key>`. Reads no observations.
        """
        infos = [leaf for leaf in self._schema.info if leaf.shape == ()]
        schema = FrameSchema(observation=(), action=(), info=tuple(infos), tasks=self._schema.tasks)
        rows = [
            {
                "part": frames.part,
                "env": int(frames.env[0]),
                "traj_id": int(frames.traj_id[0]),
                "first_step": int(frames.step[0]),
                "length": len(frames),
                "return": frames.reward.sum(dtype=np.float64),
                "terminated": bool(frames.terminated[-1]),
                "truncated": bool(frames.truncated[-1]),
                "min_policy_version": int(frames.policy_version.min()),
                "max_policy_version": int(frames.policy_version.max()),
                **{column_name(leaf): values[-1].item() for leaf, values in schema.arrays_of(frames)},
            }
            for frames in self._stored.iter_trajectories(parts=self._parts, schema=schema)
        ]
        kinds = {"part": pa.string(), "env": pa.int32(), "traj_id": pa.int64(), "first_step": pa.int64()}
        kinds |= {"length": pa.int64(), "return": pa.float64(), "terminated": pa.bool_(), "truncated": pa.bool_()}
        kinds |= dict.fromkeys(("min_policy_version", "max_policy_version"), pa.int64())
        kinds |= {column_name(leaf): pa.from_numpy_dtype(leaf.dtype) for leaf in (*schema.tasks, *schema.info)}
        return pa.Table.from_pylist(rows, pa.schema(kinds))

    def to_arrow(self, columns: Sequence[str] | None = None) -> "pa.Table":
        """All frames as a pyarrow.Table, for pandas, polars, DuckDB: `dataset.to_arrow(["reward"]).to_pandas()`.

        One row per frame: leaves by their dotted names (`observation.cam`, `action`), `reward`, `terminated`,
        `truncated`, `traj_id`, `step`, `env`, `policy_version`. An array is a list of numbers in row-major order, its
        shape in the field's metadata. For a local dataset, only compressed columns are copied.

        Args:
            columns: names of columns; None: all. The next observation is in the next row of the same `traj_id`.

        Raises:
            DatasetError: there is no such column.
        """
        arrow = self._schema.arrow({})
        names = [name for name in self._schema.columns() if not pa.types.is_list(arrow.field(name).type)]
        chosen = names if columns is None else list(columns)
        if unknown := [name for name in chosen if name not in names]:
            raise DatasetError(f"the dataset has no column {unknown[0]!r}; it has {', '.join(names)}")
        batches = []
        for part in self._parts:
            for record in part.records:
                with self._stored.reading(part, record, chosen) as reader:
                    batches += [reader.get_batch(number).select(chosen) for number in range(reader.num_record_batches)]
        table = pa.Table.from_batches(batches, pa.schema([arrow.field(name) for name in chosen]))
        plain = [field.with_type(getattr(field.type, "storage_type", field.type)) for field in table.schema]
        return table.cast(pa.schema(plain))

    def to_torch(
        self,
        *,
        columns: Sequence[str | Key] | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> "FrameStream":
        """A torch IterableDataset of TensorDicts `[N]`, split among ranks and the workers of a DataLoader.

            frames = dataset.to_torch(batch_size=256, shuffle=True, drop_last=True)
            for epoch in range(10):
                frames.set_epoch(epoch)  # another order, and another share for each rank
                for batch in DataLoader(frames, batch_size=None, collate_fn=frames.collate, num_workers=4):
                    ...

        No frame appears twice in an epoch, on any rank or worker. Shares differ by one frame at most.

        Args:
            columns: as in `frames`.
            batch_size: N. Each worker batches its own share.
            shuffle: as in `frames`; all ranks need the same seed.
            seed: seed of the shuffle.
            drop_last: leave out frames so that ranks with equally many workers get equally many batches, all full.
            rank: rank of this process. None: torch.distributed's, else $RANK, else 0.
            world_size: ranks that share the dataset. None: torch.distributed's, else $WORLD_SIZE, else 1.

        Raises:
            DatasetError: a column or a rank that does not exist, a batch size below 1, or drop_last without one.
        """
        if drop_last and batch_size is None:
            raise DatasetError("drop_last leaves out batches that are not full, and batch_size is None; set batch_size")
        from cormorant_worker.sinks.frame_stream import FrameStream, place_among_ranks

        ranks = place_among_ranks(rank, world_size)
        frames = len(self) - (len(self) % ranks[1] if drop_last else 0)
        read = partial(self.read, self.choose(columns), batch_size=check_batch_size(batch_size), drop_last=drop_last)
        return FrameStream(read, frames, shuffle=shuffle, seed=seed, ranks=ranks)

    def choose(self, columns: Sequence[str | Key] | None) -> tuple[Key, ...]:
        """The keys that `columns` select: a key selects all keys below it."""
        if columns is None:
            return self.keys
        chosen: list[Key] = []
        for column in columns:
            key = tuple(column) if isinstance(column, tuple | list) else (column,)
            matching = [known for known in self.keys if known[: len(key)] == key]
            if not matching:
                known = ", ".join(str(name[0] if len(name) == 1 else name) for name in self.keys)
                raise DatasetError(f"the dataset has no column {column!r}; it has {known}")
            chosen += matching
        return tuple(dict.fromkeys(chosen))

    def read(
        self,
        keys: tuple[Key, ...],
        start: int,
        stop: int,
        seeds: tuple[int, ...] | None,
        *,
        batch_size: int | None,
        drop_last: bool = False,
    ) -> "Iterator[TensorDict]":
        """Frames `start` to `stop` of the shards, shuffled if seeds are given."""
        shards = [(part, record) for part in self._parts for record in part.records]
        if seeds is not None:
            _generator(*seeds).shuffle(shards)
        chunks = self._read_shards(shards, keys, start, stop)
        if seeds is not None:
            rng = _generator(*seeds, start + 1)
            chosen = (leaf for key, leaf in self._schema.keys().items() if key in keys)
            # A column of every frame takes eight bytes at most.
            frame_bytes = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize if leaf else 8 for leaf in chosen)
            most = max(batch_size or 1, _MIXED_BYTES // max(1, frame_bytes))
            chunks = _mixed(chunks, rng, most=most, size=batch_size or most)
        return chunks if batch_size is None else _batched(chunks, batch_size, drop_last=drop_last)

    def _read_shards(
        self, shards: Sequence[tuple[DatasetPart, ShardRecord]], keys: tuple[Key, ...], start: int, stop: int
    ) -> "Iterator[TensorDict]":
        """Frames `start` to `stop` of the shards in this order, each batch as it was stored."""
        schema, at = self._schema.select(keys), 0
        for part, record in shards:
            if at + record.frames <= start:
                at += record.frames
                continue
            for frames in self._stored.iter_frames(replace(part, records=(record,)), schema):
                if max(at, start) < min(at + len(frames), stop):
                    yield frames.to_tensordict(keys)[max(0, start - at) : stop - at]
                at += len(frames)
                if at >= stop:
                    return


def read_dataset(uri: str | os.PathLike[str]) -> Dataset:
    """Open a dataset that jobs collected, for reading; jobs may still write to it.

        dataset = cormorant.read_dataset("data/cartpole")
        print(len(dataset), dataset.info.env, dataset.episodes.to_pandas()["return"].mean())
        for frames in dataset.frames(batch_size=256, shuffle=True):
            learn(frames)

    Args:
        uri: a folder, or any URI that fsspec knows, for example `s3://bucket/pong`.

    Raises:
        DatasetError: there is no dataset, or it cannot be read.
    """
    return Dataset(existing_dataset(os.fspath(uri)))


def _generator(*seeds: int) -> np.random.Generator:
    """A generator from any numbers, negative ones too."""
    return np.random.default_rng([int(seed) % 2**63 for seed in seeds])


def check_batch_size(batch_size: int | None) -> int | None:
    if batch_size is not None and not (isinstance(batch_size, Integral) and batch_size > 0):
        raise DatasetError(f"batch_size is {batch_size!r}; use 1 or more, or None for batches as they are stored")
    return batch_size if batch_size is None else int(batch_size)


def _mixed(chunks: "Iterator[TensorDict]", rng: np.random.Generator, *, most: int, size: int) -> "Iterator[TensorDict]":
    """Frames in random order, among about `most` of them, `size` at a time."""
    import torch

    while True:
        held: list[TensorDict] = []
        while sum(map(len, held)) < most and (chunk := next(chunks, None)) is not None:
            held.append(chunk)
        if not held:
            return
        frames = torch.cat(held)
        del held
        for rows in torch.from_numpy(rng.permutation(len(frames))).split(size):
            yield frames[rows]


def _batched(chunks: "Iterator[TensorDict]", size: int, *, drop_last: bool) -> "Iterator[TensorDict]":
    """The same frames in TensorDicts `[size]`: views, unless a batch spans two chunks."""
    import torch

    held: list[TensorDict] = []
    for chunk in chunks:
        start = 0
        while start < len(chunk):
            piece = chunk[start : start + size - sum(map(len, held))]
            start += len(piece)
            held.append(piece)
            if sum(map(len, held)) == size:
                yield held[0] if len(held) == 1 else torch.cat(held)
                held = []
    if held and not drop_last:
        yield torch.cat(held)
