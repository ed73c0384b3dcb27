"""A batch as a safetensors file: for HTTP and for files.

    header | the parts' arrays, time-major as they were collected, each observation once

Tensors of part p (a worker's share, in slot order) are named `p/<key>`:

    observation, recurrent states [T+1, B, ...]    the input of each step, and the result of the last one
    action, policy outputs, next/info/<key> [T, B, ...]
    is_init, next/terminated, next/truncated [T, B] bool    next/reward [T, B] f32
    collector/traj_ids, collector/policy_version [T, B] i64    collector/lengths [B] i64: frames of each column
    collector/task_id [T, B] i64, where the manifest has variants, which the metadata names as "tasks"
    ends/time, ends/env [K] i64    final/<observation or state> [K, ...]: true final values of those steps

Groups of agents have next/<group>/reward f32 and flags [T, B, n, 1], and without teamReward there is no next/reward.
Nested keys are joined by "/". Tensors without elements are left out. Rows past a column's length are zero, except the
first one of the carried arrays.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from cormorant_contract.tensor_file import NUMPY_NAMES, make_header
from cormorant_worker.collect.block import Block
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.spaces import Array, Arrays, Leaf

FORMAT = 1
_LINE = 64
_DTYPES = {np.dtype(attribute): name for name, attribute in NUMPY_NAMES.items()}


def encode(loan: Loan, *, batch_id: str, delivery: int) -> list[memoryview]:
    """Encode a loan, which must not be released before they are sent, as the pieces of a file: the header, then each
    tensor, a view of the loan's memory. Tensors of a multiple of 64 bytes come first, so that they begin at such
    multiples. `batch_id`: `<epoch>-<n>`; `delivery`: from 1.
    """
    found = ((i, key, array) for i, part in enumerate(loan.parts) for key, array in arrays_of(part.block))
    tensors = [(f"{i}/{key}", array) for i, key, array in found if array.size]
    tensors.sort(key=lambda item: (item[1].nbytes % _LINE > 0, -item[1].itemsize))
    described = ((name, _DTYPES[array.dtype], array.shape) for name, array in tensors)
    header, _ = make_header(described, {"cormorant_batch": json.dumps(describe(loan, batch_id, delivery))})
    return [memoryview(header), *(array.reshape(-1).view(np.uint8).data for _, array in tensors)]


def describe(loan: Loan, batch_id: str, delivery: int) -> dict[str, Any]:
    parts = [
        {
            "worker": part.worker,
            "attempt": part.attempt,
            "num_envs": part.block.layout.num_envs,
            "num_steps": part.block.num_rows,
            "num_ends": part.block.num_ends,
            "frames": part.block.num_frames,
        }
        for part in loan.parts
    ]
    asked: dict[str, Any] = {"post_processing": loan.post_processing} if loan.post_processing else {}
    if statistics := loan.statistics:
        asked["statistics"] = statistics
    if names := loan.parts[0].block.layout.task_names:
        asked["tasks"] = names
    return asked | {
        "format": FORMAT,
        "id": batch_id,
        "frames": loan.num_frames,
        "num_steps": max(part.block.num_rows for part in loan.parts),
        "min_version": loan.min_version,
        "max_version": loan.max_version,
        "mode": loan.mode,
        "delivery": delivery,
        "parts": parts,
    }


def arrays_of(block: Block) -> Iterator[tuple[str, Array]]:
    """Contiguous views of every array of a sealed block, by key."""
    block.blank_padding()
    layout, rows, ends = block.layout, block.num_rows, block.num_ends
    yield from _named("", layout.observation, block.observation, rows + 1)
    yield from _named("", layout.states, block.states, rows + 1)
    yield from _named("", layout.action, block.action, rows)
    yield from _named("", layout.outputs, block.outputs, rows)
    yield from _named("next/", layout.info, block.info, rows)
    if layout.states:
        yield "is_init", block.is_init[:rows]
    if not layout.hides_reward:
        yield "next/reward", block.reward[:rows]
    yield "next/terminated", block.terminated[:rows]
    yield "next/truncated", block.truncated[:rows]
    yield "collector/traj_ids", block.traj_ids[:rows]
    yield "collector/policy_version", block.policy_version[:rows]
    yield from _named("collector/", layout.tasks, block.tasks, rows)
    yield "collector/lengths", block.lengths
    yield "ends/time", block.end_rows[:ends]
    yield "ends/env", block.end_columns[:ends]
    yield from _named("final/", layout.observation, block.final, ends)
    yield from _named("final/", layout.states, block.final_states, ends)


def _named(prefix: str, leaves: tuple[Leaf, ...], arrays: Arrays, rows: int) -> Iterator[tuple[str, Array]]:
    for leaf, array in zip(leaves, arrays, strict=True):
        yield prefix + "/".join(leaf.key), array[:rows]
