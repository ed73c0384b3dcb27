"""Batches in the head's memory of which something cannot be had: the head may write there at once, and no descriptor
stays open.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from cormorant_client import BadBatch, Delivery, RemoteBatches, connect
from cormorant_contract.rest.base import MEMORY_JSON
from cormorant_contract.tensor_file import parse_header
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead, problem

PARTS = 3
SHAPES = {"observation": (3, 4), "action": (2, 4), "next/reward": (2, 4), "next/terminated": (2, 4),
          "next/truncated": (2, 4), "collector/traj_ids": (2, 4), "collector/policy_version": (2, 4)}  # fmt: skip
DESCRIBED = {
    "format": 1, "id": "e-1", "frames": 24, "min_version": 0, "max_version": 0, "mode": "sync", "delivery": 1,
    "parts": [
        {"worker": f"cpu-{part}", "attempt": 0, "num_envs": 4, "num_steps": 2, "num_ends": 0, "frames": 8}
        for part in range(PARTS)
    ],
}  # fmt: skip
FILE = safetensors.numpy.save(
    {f"{part}/{name}": np.full(shape, part, np.int64) for part in range(PARTS) for name, shape in SHAPES.items()}
    | {f"{part}/collector/lengths": np.full(4, 2) for part in range(PARTS)},
    {"cormorant_batch": json.dumps(DESCRIBED)},
)

Told = dict[str, Any]


@pytest.fixture
def memories() -> Iterator[list[int]]:
    """What three workers wrote. This process listens, so that it passes for the head."""
    found = [os.memfd_create("of_worker") for _ in range(PARTS)]
    for descriptor in found:
        os.write(descriptor, FILE)
    yield found
    for descriptor in found:
        os.close(descriptor)


def lend(memories: list[int]) -> Told:
    file = parse_header(FILE)
    return {
        "id": "e-1", "frames": 24, "min_version": 0, "max_version": 0, "delivery": 1, "ack_within_s": 60.0,
        "lent_at": time.monotonic(), "metadata": file.metadata,
        "parts": [
            {
                "path": f"/proc/{os.getpid()}/fd/{descriptor}",
                "size_bytes": len(FILE),
                "tensors": {
                    name: {"dtype": entry.dtype, "shape": entry.shape, "offset": file.data_start + entry.begin}
                    for name, entry in file.tensors.items()
                    if name.startswith(f"{part}/")
                },
            }
            for part, descriptor in enumerate(memories)
        ],
    }  # fmt: skip


@contextmanager
def borrowing(told: Told) -> Iterator[tuple[RemoteBatches[Delivery], ScriptedHead]]:
    """Deliveries of a head that lends one batch in memory, the same as bytes when it is asked again, and no other."""
    answers = [Say(body=json.dumps(told).encode(), headers={"Content-Type": MEMORY_JSON}), Say(body=FILE)]

    def answer(heard: Heard) -> Say:
        if not heard.path.startswith("/v1/batches/next"):
            return Say()
        return answers.pop(0) if answers else problem(410, "stream-ended")

    with ScriptedHead(answer) as head, connect(head.url) as client, client.deliveries(frames=24) as batches:
        yield batches, head


def opened() -> int:
    """Descriptors of this process that lead to such memory."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself
            found += "memfd:of_worker" in str(descriptor.readlink())
    return found


def locked(memories: list[int]) -> list[bool]:
    """What the head tries before a worker may write there."""
    found = []
    for memory in memories:
        descriptor = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(False)
        except BlockingIOError:
            found.append(True)
        finally:
            os.close(descriptor)
    return found


def test_memory_is_held_until_the_batch_is_acknowledged(memories: list[int]) -> None:
    with borrowing(lend(memories)) as (batches, _):
        batch = next(batches)
        assert batch.is_shared
        assert batch.numpy()["action"][:, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert locked(memories) == [True] * PARTS
        assert next(batches, None) is None
        assert locked(memories) == [False] * PARTS


@pytest.mark.parametrize(
    ("lent_s_ago", "part", "is_ours"),
    [
        (0.0, {"size_bytes": len(FILE) + 1}, True),
        (0.0, {"path": f"/proc/{os.getpid()}/fd/999999"}, True),
        (0.0, {"path": f"/proc/{os.getppid()}/fd/0"}, True),
        (61.0, {}, False),
    ],
    ids=["too long", "gone", "of another process", "went to another consumer"],
)
def test_memory_that_cannot_be_had_is_let_go(memories: list[int], lent_s_ago: float, part: Told, is_ours: bool) -> None:
    told = lend(memories)
    told["lent_at"] -= lent_s_ago
    told["parts"][1] |= part
    with borrowing(told) as (batches, head):
        assert not next(batches).is_shared  # the same, as bytes
        assert (opened(), locked(memories)) == (PARTS, [False] * PARTS)
        released = [heard.path for heard in head.heard if heard.method == "POST"]
        assert released == ["/v1/batches/e-1/release?delivery=1"] * is_ours


def test_a_part_that_the_head_holds_is_given_up(memories: list[int]) -> None:
    mine = os.open(f"/proc/self/fd/{memories[1]}", os.O_RDONLY)
    fcntl.flock(mine, fcntl.LOCK_EX)
    try:
        with borrowing(lend(memories)) as (batches, _):
            assert not next(batches).is_shared
            assert (opened(), locked(memories)) == (PARTS + 1, [False, True, False])
    finally:
        os.close(mine)


def test_memory_that_contradicts_its_metadata_is_not_held_by_the_error(memories: list[int]) -> None:
    told = lend(memories)
    told["parts"][1]["tensors"]["1/action"]["offset"] = len(FILE)
    with borrowing(told) as (batches, _):
        with pytest.raises(BadBatch, match="no longer contains that batch") as error:
            next(batches)
        assert error.value.__traceback__ is not None
        assert locked(memories) == [False] * PARTS
