"""Parquet: one file per part, one row per frame, bounded row groups. Called by `export.py`.

Columns are those of the shards (`schema.py`) as plain Parquet types, a leaf's shape in the field's metadata;
`next.<leaf>` is null where the following row of the same `traj_id` contains it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks.dataset import StoredDataset
from cormorant_worker.sinks.schema import NEXT, FrameSchema, column_name
from cormorant_worker.spaces import Array, Leaf

_GROUP_BYTES = 64 << 20
_MOST_ROWS = 1 << 20


def write_parquet(dataset: StoredDataset, target: Path, *, is_nested: bool = False) -> tuple[int, int, int]:
    """Write `<target>/<part>.parquet` for each part that has frames; returns frames, trajectories that ended, and those
    whose end is missing. `is_nested`: an array is a list of lists; otherwise one list in row-major order.
    """
    schema = dataset.description.schema
    arrow = _parquet_schema(dataset, is_nested=is_nested)
    rows = max(1, min(_MOST_ROWS, _GROUP_BYTES // max(1, schema.frame_bytes())))
    written = ended = 0
    for part in dataset.parts():
        if not part.frames:
            continue
        draft = target / f"{part.name}.parquet.open"
        with pq.ParquetWriter(draft, arrow, compression="zstd", compression_level=1) as writer:
            for frames in dataset.iter_frames(part):
                columns = [_column(leaf, values, is_nested=is_nested) for leaf, values in schema.arrays_of(frames)]
                columns += [pa.array(getattr(frames, name)) for name, _ in schema.plain]
                has_next = np.isin(np.arange(len(frames)), frames.next_rows)
                places = pa.array(np.cumsum(has_next) - 1, mask=~has_next)
                following = zip(schema.carried, frames.next_values, strict=True)
                columns += [_column(leaf, values, is_nested=is_nested).take(places) for leaf, values in following]
                writer.write_table(pa.Table.from_arrays(columns, schema=arrow), row_group_size=rows)
                written += len(frames)
                ended += int(np.count_nonzero(frames.terminated | frames.truncated))
        draft.rename(target / f"{part.name}.parquet")
    no_leaves = FrameSchema(observation=(), action=())
    cut = sum(frames.is_cut for frames in dataset.iter_trajectories(schema=no_leaves))
    return written, ended, cut


def _parquet_schema(dataset: StoredDataset, *, is_nested: bool) -> Any:
    fields = []
    schema = dataset.description.schema
    leaves = {column_name(leaf): leaf for _, leaves in schema.kinds for leaf in leaves}
    for field in schema.arrow({}):
        leaf = leaves.get(field.name.removeprefix(NEXT))
        if leaf is None:
            fields.append(field)
            continue
        is_next = field.name.startswith(NEXT) and field.name not in leaves
        shape = {"cormorant.shape": str(list(leaf.shape)), "cormorant.dtype": leaf.dtype.name}
        kind = pa.from_numpy_dtype(leaf.dtype)
        for _ in leaf.shape if is_nested else leaf.shape[:1]:
            kind = pa.list_(pa.field("element", kind, nullable=False))
        fields.append(pa.field(field.name, kind, nullable=is_next, metadata=shape))
    return pa.schema(fields, metadata={"cormorant.dataset": dataset.description.to_bytes()})


def nested_lists(values: Array) -> Any:
    """[n, ...] values as an Arrow array of n lists of lists."""
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        offsets = np.arange(0, len(array) + 1, size, dtype=np.int64)
        kind = pa.list_(pa.field("element", array.type, nullable=False))
        array = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), array, type=kind)
    return array


def _column(leaf: Leaf, values: Array, *, is_nested: bool) -> Any:
    """[n, ...] values as a column of n rows."""
    if values.size > np.iinfo(np.int32).max:
        name = column_name(leaf)
        raise DatasetError(f"a batch holds {values.size} numbers of {name}, more than a Parquet list takes")
    return nested_lists(values if is_nested or leaf.shape == () else values.reshape(len(values), -1))
