"""Batches as bytes, written plainly from the description of the format, which encoder and decoder must agree on."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from cormorant_contract.tensor_file import make_header
from cormorant_worker.collect.block import Block
from cormorant_worker.spaces import Array

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}


def arrays_of(block: Block) -> dict[str, Array]:
    """The arrays of one worker's share, by name."""
    rows, layout, found = block.num_rows, block.layout, {}
    ends = slice(0, block.num_ends)
    for leaf, array, final in zip(layout.observation, block.observation, block.final, strict=True):
        found["/".join(leaf.key)] = array[: rows + 1]
        found["/".join(("final", *leaf.key))] = final[ends]
    for leaf, array, final in zip(layout.states, block.states, block.final_states, strict=True):
        found["/".join(leaf.key)] = array[: rows + 1]
        found["/".join(("final", *leaf.key))] = final[ends]
    for leaves, arrays in ((layout.action, block.action), (layout.outputs, block.outputs)):
        found |= {"/".join(leaf.key): array[:rows] for leaf, array in zip(leaves, arrays, strict=True)}
    found |= {"/".join(("next", *leaf.key)): a[:rows] for leaf, a in zip(layout.info, block.info, strict=True)}
    found |= {
        "is_init": block.is_init[:rows],
        "next/reward": block.reward[:rows],
        "next/terminated": block.terminated[:rows],
        "next/truncated": block.truncated[:rows],
        "collector/traj_ids": block.traj_ids[:rows],
        "collector/policy_version": block.policy_version[:rows],
        "collector/lengths": block.lengths,
        "ends/time": block.end_rows[ends],
        "ends/env": block.end_columns[ends],
    }
    if not layout.states:
        del found["is_init"]
    return {name: array for name, array in found.items() if array.size}


def encode_blocks(blocks: Sequence[Block], *, id: str = "e-1", mode: str = "async", **metadata: Any) -> bytes:  # noqa: A002
    """A safetensors batch with a copy of everything."""
    arrays = {f"{i}/{name}": array for i, block in enumerate(blocks) for name, array in arrays_of(block).items()}
    described = {
        "format": 1,
        "id": id,
        "frames": sum(block.num_frames for block in blocks),
        "num_steps": max(block.num_rows for block in blocks),
        "min_version": 0,
        "max_version": 0,
        "mode": mode,
        "delivery": 1,
        "parts": [
            {
                "worker": f"cpu-{i}",
                "attempt": 0,
                "num_envs": block.layout.num_envs,
                "num_steps": block.num_rows,
                "num_ends": block.num_ends,
                "frames": block.num_frames,
            }
            for i, block in enumerate(blocks)
        ],
        **metadata,
    }
    return encode_arrays(arrays, {"cormorant_batch": json.dumps(described)})


def encode_arrays(arrays: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file of arrays, widest dtypes first."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    header, _ = make_header(((name, NAMES[a.dtype.name], a.shape) for name, a in ordered), metadata)
    return header + b"".join(np.ascontiguousarray(array).tobytes() for _, array in ordered)
