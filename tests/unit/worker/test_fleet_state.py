"""A fleet's state as bytes."""

from dataclasses import replace

import pytest

from cormorant_worker.errors import StateError
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.weights.staged import PolicyVersion

STATE = FleetState(
    frames=7, version=PolicyVersion(2), weights=b"weights", seed=3, attempts={"cpu-0": 1, "cpu-1": 0}, run="r", epoch=4,
    dataset="file:///data", written={"cpu-0": 5}, workers={"cpu-0": b"zero", "cpu-1": b"one"},
)  # fmt: skip


def test_state_is_read_without_a_copy() -> None:
    data = STATE.to_bytes()
    read = FleetState.from_bytes(data)
    assert read == STATE
    for part in (read.weights, *read.workers.values()):
        assert isinstance(part, memoryview)
        assert part.obj is data


def test_state_without_weights_has_none() -> None:
    assert FleetState.from_bytes(replace(STATE, weights=b"").to_bytes()).weights == b""


@pytest.mark.parametrize("data", [b"", b"x" * 100, STATE.to_bytes()[:-1]])
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match=f"these {len(data)} bytes are not a fleet's state"):
        FleetState.from_bytes(data)
