"""A dataset as Parquet: one file a part, one row a frame, bounded row groups. Called by `export`.

Columns are those of the shards (`schema.py`) as plain Parquet types: a leaf is a number or a list of numbers in
row-major order, its shape in the field's metadata; `next.<leaf>` is null where the
following row of the same `traj_id` says it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks.dataset import Dataset
from cormorant_worker.sinks.frames import Frames
from cormorant_worker.sinks.reading import Exported, iter_part
from cormorant_worker.sinks.schema import NEXT, FrameSchema, column_name
from cormorant_worker.spaces import Array, Leaf

_GROUP_BYTES = 64 << 20
_MOST_ROWS = 1 << 20


def export_parquet(dataset: Dataset, target: Path) -> Exported:
    """Write `<target>/<part>.parquet` for each part that has frames."""
    schema = dataset.description.schema
    arrow = _arrow_schema(dataset)
    rows = max(1, min(_MOST_ROWS, _GROUP_BYTES // max(1, schema.frame_bytes())))
    written = ended = cut = 0
    for part in dataset.parts():
        if not part.frames:
            continue
        seen: dict[int, tuple[int, bool]] = {}
        draft = target / f"{part.name}.parquet.open"
        with pq.ParquetWriter(draft, arrow, compression="zstd", compression_level=1) as writer:
            for frames in iter_part(dataset, part):
                table = _to_table(frames, arrow)
                writer.write_table(table, row_group_size=rows)
                written += len(frames)
                ended += int(np.count_nonzero(frames.terminated | frames.truncated))
                cut += _count_cut(frames, seen)
        cut += sum(not done for _, done in seen.values())
        draft.rename(target / f"{part.name}.parquet")
    return Exported(path=target, frames=written, episodes=ended, cut=cut)


def _count_cut(frames: Frames, seen: dict[int, tuple[int, bool]]) -> int:
    """Trajectories that were open before this batch and do not go on in it; notes what is open after it."""
    order, starts = frames.runs()
    lasts = order[np.r_[starts[1:], len(order)] - 1]
    done = frames.terminated[lasts] | frames.truncated[lasts]
    cut = 0
    for env, *now in zip(frames.env[lasts].tolist(), frames.traj_id[lasts].tolist(), done.tolist(), strict=True):
        known, has_ended = seen.get(env, (now[0], True))
        cut += not has_ended and known != now[0]
        seen[env] = now[0], now[1]
    return cut


def _arrow_schema(dataset: Dataset) -> Any:
    fields = []
    schema = dataset.description.schema
    leaves = {column_name(leaf): leaf for _, leaves in schema.kinds for leaf in leaves}
    for field in schema.arrow({}):
        leaf = leaves.get(field.name.removeprefix(NEXT))
        if leaf is None:
            fields.append(field)
        else:
            is_next = field.name.startswith(NEXT) and field.name not in leaves
            fields.append(pa.field(field.name, _plain_type(leaf), nullable=is_next, metadata=_shape(leaf)))
    described = {"cormorant.dataset": dataset.description.to_bytes()}
    return pa.schema(fields, metadata=described)


def _plain_type(leaf: Leaf) -> Any:
    value = pa.from_numpy_dtype(leaf.dtype)
    return value if leaf.shape == () else pa.list_(pa.field("element", value, nullable=False))


def _shape(leaf: Leaf) -> dict[str, str]:
    return {"cormorant.shape": str(list(leaf.shape)), "cormorant.dtype": leaf.dtype.name}


def _to_table(frames: Frames, arrow: Any) -> Any:
    schema: FrameSchema = frames.schema
    everyone = np.arange(len(frames))
    columns: list[Any] = [_column(leaf, values, everyone, len(frames)) for leaf, values in schema.arrays_of(frames)]
    columns += [pa.array(getattr(frames, name)) for name, _ in schema.plain]
    following = frames.next_observation + frames.next_states
    columns += [
        _column(leaf, values, frames.next_rows, len(frames))
        for leaf, values in zip(schema.carried, following, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=arrow)


def _column(leaf: Leaf, values: Array, rows: Array, count: int) -> Any:
    """[k, ...] values that belong to `rows`, as a column of `count` rows with nulls elsewhere."""
    missing = np.ones(count, dtype=np.bool_)
    missing[rows] = False
    if leaf.shape == ():
        full = np.zeros(count, dtype=leaf.dtype)
        full[rows] = values
        return pa.array(full, mask=missing)
    size = int(np.prod(leaf.shape))
    counts = np.where(missing, 0, size)
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise DatasetError(
            f"a batch holds {offsets[-1]} numbers of {column_name(leaf)}, more than a Parquet list takes"
        )
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)),
        flat,
        type=_plain_type(leaf),
        mask=pa.array(missing) if missing.any() else None,
    )
