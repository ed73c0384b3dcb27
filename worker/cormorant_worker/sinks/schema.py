"""The Arrow schema of a shard: the columns of a frame, one per leaf.

    observation leaves     observation, observation.pos, ...    fixed-shape tensors, or plain numbers for shape ()
    action leaves          action, ...
    policy outputs         action_log_prob, ...
    recurrent states       hidden, ... and is_init (bool)
    info, where declared   info.<key>: of the frame's step
    task_id int64, where the manifest has variants
    reward float32; terminated, truncated bool
    traj_id int64, step int32, env int32, policy_version int64
    next.<leaf>            list of 0 or 1 values, for each observation leaf and each state

`next.<leaf>` is filled where the following observation is not simply the next row of the same `env`: at the end of a
trajectory (the true final observation) and at a column's last frame of a batch. So a record batch is self-contained.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from cormorant_worker.collect.block import Layout
from cormorant_worker.errors import DatasetError
from cormorant_worker.spaces import Array, Key, Leaf

FORMAT_VERSION = 1
NEXT = "next."
KINDS = {
    "observation": "observation",
    "action": "action",
    "output": "outputs",
    "state": "states",
    "info": "info",
    "task": "tasks",
}
"""Names of the kinds of leaves in files, layouts, schemas, blocks and frames."""
_PLAIN = (
    ("reward", np.dtype(np.float32)),
    ("terminated", np.dtype(np.bool_)),
    ("truncated", np.dtype(np.bool_)),
    ("traj_id", np.dtype(np.int64)),
    ("step", np.dtype(np.int32)),
    ("env", np.dtype(np.int32)),
    ("policy_version", np.dtype(np.int64)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSchema:
    """The leaves of a dataset's frames. Equal schemas give equal columns for any T and B."""

    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...] = ()
    states: tuple[Leaf, ...] = ()
    info: tuple[Leaf, ...] = ()
    tasks: tuple[Leaf, ...] = ()

    @classmethod
    def of(cls, layout: Layout) -> "FrameSchema":
        return cls(**{name: getattr(layout, name) for name in KINDS.values()})

    @property
    def kinds(self) -> tuple[tuple[str, tuple[Leaf, ...]], ...]:
        return tuple((kind, getattr(self, name)) for kind, name in KINDS.items())

    def arrays_of(self, holder: Any) -> Iterator[tuple[Leaf, Array]]:
        """Each leaf, with its array in a block or in frames."""
        for name in KINDS.values():
            yield from zip(getattr(self, name), getattr(holder, name), strict=True)

    @property
    def carried(self) -> tuple[Leaf, ...]:
        return self.observation + self.states

    def keys(self) -> dict[Key, Leaf | None]:
        """Keys of the frames as a TensorDict, each with its leaf, or None for columns of every frame. `is_init` is the
        states'.
        """
        roots = {"info": ("next",), "tasks": ("collector",)}
        leaves: dict[Key, Leaf | None] = {
            (*roots.get(name, ()), *leaf.key): leaf for name in KINDS.values() for leaf in getattr(self, name)
        }
        leaves |= {("next", *leaf.key): leaf for leaf in self.carried}
        leaves |= {("is_init",): self.states[0]} if self.states else {}
        leaves |= dict.fromkeys(("next", name) for name in ("reward", "done", "terminated", "truncated"))
        return leaves | dict.fromkeys(("collector", name) for name in ("traj_ids", "policy_version"))

    def select(self, keys: Collection[Key]) -> "FrameSchema":
        wanted = {leaf for key, leaf in self.keys().items() if key in keys}
        return FrameSchema(
            **{name: tuple(leaf for leaf in getattr(self, name) if leaf in wanted) for name in KINDS.values()}
        )

    @property
    def plain(self) -> tuple[tuple[str, np.dtype[Any]], ...]:
        """Columns of every frame besides its leaves: name and dtype."""
        return (*_PLAIN, ("is_init", np.dtype(np.bool_))) if self.states else _PLAIN

    def columns(self) -> tuple[str, ...]:
        """Names of a shard's columns, in order."""
        leaves = tuple(column_name(leaf) for _, leaves in self.kinds for leaf in leaves)
        carried = tuple(NEXT + column_name(leaf) for leaf in self.carried)
        return (*leaves, *(name for name, _ in self.plain), *carried)

    @property
    def is_compressed(self) -> bool:
        """Shards are compressed (lz4) where observations are images."""
        return any(leaf.dtype == np.uint8 and len(leaf.shape) >= 3 for leaf in self.observation)

    def frame_bytes(self) -> int:
        """Bytes of one frame before compression, without its `next.` columns."""
        leaves = (leaf for _, leaves in self.kinds for leaf in leaves)
        own = sum(int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize for leaf in leaves)
        return own + sum(dtype.itemsize for _, dtype in self.plain)

    def fingerprint(self) -> str:
        """Sixteen hex digits that are equal for equal schemas, in every process and version."""
        described = [
            [kind, list(leaf.key), list(leaf.shape), leaf.dtype.name] for kind, leaves in self.kinds for leaf in leaves
        ]
        return hashlib.sha256(json.dumps([FORMAT_VERSION, described]).encode()).hexdigest()[:16]

    def arrow(self, metadata: dict[str, str]) -> Any:
        fields = []
        for kind, leaves in self.kinds:
            for leaf in leaves:
                described = {
                    "cormorant.kind": kind,
                    "cormorant.key": json.dumps(leaf.key),
                    "cormorant.shape": json.dumps(leaf.shape),
                    "cormorant.dtype": leaf.dtype.name,
                }
                fields.append(pa.field(column_name(leaf), arrow_type(leaf), nullable=False, metadata=described))
        fields += [pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in self.plain]
        fields += [pa.field(NEXT + column_name(leaf), next_type(leaf), nullable=False) for leaf in self.carried]
        twice = [name for name, count in Counter(field.name for field in fields).items() if count > 1]
        if twice:
            raise DatasetError(
                f"two columns of the dataset would be called {twice[0]!r}; "
                "rename the policy's output, the part of the Dict space or the key of info"
            )
        own = {"cormorant.format": str(FORMAT_VERSION), "cormorant.schema": self.fingerprint()}
        return pa.schema(fields, metadata=own | metadata)


def column_name(leaf: Leaf) -> str:
    """`("observation", "cam", "0")` -> `observation.cam.0`."""
    return ".".join(leaf.key)


@cache
def arrow_type(leaf: Leaf) -> Any:
    """The Arrow type of one value; bool leaves are stored as uint8."""
    value = pa.from_numpy_dtype(np.dtype(np.uint8) if leaf.dtype == np.bool_ else leaf.dtype)
    if leaf.shape == ():
        return value
    if 0 in leaf.shape:
        return pa.list_(value, 0)
    return pa.fixed_shape_tensor(value, leaf.shape)


def next_type(leaf: Leaf) -> Any:
    return pa.list_(pa.field("item", arrow_type(leaf), nullable=False))


def to_arrow(leaf: Leaf, values: Array) -> Any:
    """View [n, *leaf.shape] values of the leaf's dtype as an Arrow array; copies only noncontiguous ones."""
    stored = np.ascontiguousarray(values)
    if stored.dtype == np.bool_:
        stored = stored.view(np.uint8)
    numbers = plain_to_arrow(stored.reshape(-1))
    if leaf.shape == ():
        return numbers
    kind = arrow_type(leaf)
    storage_type = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    storage = pa.Array.from_buffers(storage_type, len(values), [None], children=[numbers])
    return pa.ExtensionArray.from_storage(kind, storage) if storage_type is not kind else storage


def plain_to_arrow(values: Array) -> Any:
    """View [n] numbers as an Arrow array; flags are packed. `pa.array` would import pandas, for most of a second."""
    data = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(data)])


def to_numpy(leaf: Leaf, column: Any) -> Array:
    """View an Arrow array that `to_arrow` made as [n, *leaf.shape], without a copy."""
    if leaf.shape == ():
        values: Array = column.to_numpy(zero_copy_only=True)
    else:
        storage = column.storage if isinstance(column, pa.ExtensionArray) else column
        values = storage.flatten().to_numpy(zero_copy_only=True)
    if leaf.dtype == np.bool_:
        values = values.view(np.bool_)
    return values.reshape((len(column), *leaf.shape))


def nested_lists(values: Array) -> Any:
    """[n, ...] values as an Arrow array of n lists of lists."""
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        offsets = np.arange(0, len(array) + 1, size, dtype=np.int64)
        kind = pa.list_(pa.field("element", array.type, nullable=False))
        array = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), array, type=kind)
    return array
