"""Batches as safetensors files, read back by the reference library."""

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from cormorant_contract.tensor_file import ITEM_BYTES, parse_header
from cormorant_testing.collecting import make_collector
from cormorant_worker.collect.block import Block
from cormorant_worker.fleet.batch_file import encode
from cormorant_worker.fleet.batch_queue import Loan, LoanPart
from cormorant_worker.wire import SharedMemory

CASES: list[dict[str, Any]] = [
    {"num_envs": 3, "lengths": (3, 1, 7), "ends": "alternate"},
    {"num_envs": 2, "policy": "counter", "lengths": (3, 8)},
    {"num_envs": 3, "observation": "nested", "lengths": 4},
    {"num_envs": 2, "policy": "with_outputs", "observation": "box", "lengths": 100},
    {"num_envs": 2, "observation": "image", "action": "dict", "lengths": 5},
]


def filled(num_frames: int, num_rows: int, options: dict[str, Any]) -> tuple[Block, SharedMemory]:
    """A block in shared memory whose every byte was in use before."""
    collector = make_collector(**{k: [v] if k == "lengths" and isinstance(v, int) else v for k, v in options.items()})
    layout = collector.layout(num_rows)
    memory = SharedMemory.create(layout.size_bytes)
    block = Block(layout, memory.buffer)
    collector.fill(block, num_rows * collector.num_envs)
    collector.fill(block, num_frames)
    return block, memory


def loan_of(*parts: tuple[Block, SharedMemory | None]) -> Loan:
    return Loan(
        tuple(
            LoanPart(worker=f"cpu-{i}", attempt=i, block=block, memory=memory)
            for i, (block, memory) in enumerate(parts)
        ),
        mode="sync" if len(parts) > 1 else "async",
        num_frames=sum(block.num_frames for block, _ in parts),
        min_version=0,
        max_version=3,
    )


def expected(block: Block) -> dict[str, np.ndarray]:
    """What a part must hold, written down without the code that is tested."""
    T, K, layout = block.num_rows, block.num_ends, block.layout
    found = {
        "next/reward": block.reward[:T],
        "next/terminated": block.terminated[:T],
        "next/truncated": block.truncated[:T],
        "collector/traj_ids": block.traj_ids[:T],
        "collector/policy_version": block.policy_version[:T],
        "collector/lengths": block.lengths,
        "ends/time": block.end_rows[:K],
        "ends/env": block.end_columns[:K],
    }
    for leaves, carried, final in (
        (layout.observation, block.observation, block.final),
        (layout.states, block.states, block.final_states),
    ):
        for leaf, array, last in zip(leaves, carried, final, strict=True):
            found["/".join(leaf.key)] = array[: T + 1]
            found["final/" + "/".join(leaf.key)] = last[:K]
    for leaves, arrays in ((layout.action, block.action), (layout.outputs, block.outputs)):
        found |= {"/".join(leaf.key): array[:T] for leaf, array in zip(leaves, arrays, strict=True)}
    for leaf, array in zip(layout.info, block.info, strict=True):
        found["next/" + "/".join(leaf.key)] = array[:T]
    if layout.states:
        found["is_init"] = block.is_init[:T]
    return {key: array for key, array in found.items() if array.size}


def joined(loan: Loan) -> tuple[bytes, dict[str, np.ndarray]]:
    data = b"".join(encode(loan, batch_id="7-3", delivery=2))
    return data, safetensors.numpy.load(data)


@pytest.mark.parametrize(
    "options", CASES, ids=lambda options: options.get("policy") or options.get("observation", "box")
)
@pytest.mark.parametrize("frames", ["full", "masked", "short"])
def test_the_reference_library_reads_every_value(options: dict[str, Any], frames: str) -> None:
    envs = options["num_envs"]
    num_frames = {"full": 6 * envs, "masked": 6 * envs - 1, "short": 4 * envs}[frames]
    block, memory = filled(num_frames, 6, options)
    assert block.is_full == (frames != "masked")
    data, found = joined(loan_of((block, memory)))
    wanted = expected(block)
    assert found.keys() == {f"0/{key}" for key in wanted}
    for key, array in wanted.items():
        theirs = found[f"0/{key}"]
        assert theirs.dtype == array.dtype, key
        assert np.array_equal(theirs, array), key
    if frames == "masked":
        # What earlier batches left behind the shorter columns does not travel.
        assert found["0/collector/traj_ids"][5, envs - 1] == 0
        assert found["0/next/reward"][5, envs - 1] == 0
    described = json.loads(parse_header(data).metadata["cormorant_batch"])
    assert described == {
        "format": 1, "id": "7-3", "frames": num_frames, "num_steps": block.num_rows, "min_version": 0,
        "max_version": 3, "mode": "async", "delivery": 2,
        "parts": [{"worker": "cpu-0", "attempt": 0, "num_envs": envs, "num_steps": block.num_rows,
                   "num_ends": block.num_ends, "frames": num_frames}],
    }  # fmt: skip


def test_parts_stand_side_by_side_and_may_differ_in_length() -> None:
    first, second = filled(12, 6, CASES[0]), filled(9, 6, CASES[0])
    data, found = joined(loan_of(first, second))
    assert found["0/observation"].shape == (5, 3, 4)
    assert found["1/observation"].shape == (4, 3, 4)
    described = json.loads(parse_header(data).metadata["cormorant_batch"])
    assert (described["num_steps"], described["frames"], described["mode"]) == (4, 21, "sync")
    assert [(part["worker"], part["attempt"], part["frames"]) for part in described["parts"]] == [
        ("cpu-0", 0, 12), ("cpu-1", 1, 9)
    ]  # fmt: skip


def test_nothing_is_copied_and_bulk_begins_at_round_offsets() -> None:
    block, memory = filled(64, 32, {"num_envs": 2, "observation": "image", "lengths": (5,)})
    loan = loan_of((block, memory))
    wire = encode(loan, batch_id="0-0", delivery=1)
    block.observation[0][0, 0] = 77
    data = b"".join(wire)
    assert (safetensors.numpy.load(data)["0/observation"][0, 0] == 77).all()
    file = parse_header(data)
    for name, entry in file.tensors.items():
        is_round = (entry.end - entry.begin) % 64 == 0
        alignment = 64 if is_round else ITEM_BYTES[entry.dtype]
        assert (file.data_start + entry.begin) % alignment == 0, name
