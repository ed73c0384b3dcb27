"""A fleet's state as bytes."""

import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from cormorant_worker.collect.state import read_metadata
from cormorant_worker.errors import StateError
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.weights.blob import to_bytes
from cormorant_worker.weights.staged import PolicyVersion

STATE = FleetState(
    frames=7, version=PolicyVersion(2), weights=b"weights", seed=1 << 63, attempts={"cpu-0": 1, "cpu-1": 0}, run="r",
    epoch=4, dataset="file:///data", written={"cpu-0": 5}, workers={"cpu-0": b"zero", "cpu-1": b"one"},
)  # fmt: skip


def test_state_is_read_without_a_copy() -> None:
    data = STATE.to_bytes()
    read = FleetState.from_bytes(data)
    assert read == STATE
    for part in (read.weights, *read.workers.values()):
        assert isinstance(part, memoryview)
        assert part.obj is data


def test_past_publishes_are_one_where_later_ones_hide_them() -> None:
    def of(**models: float) -> bytes:
        return to_bytes({model: {"number": torch.tensor(value)} for model, value in models.items()})

    state = replace(
        STATE, version=PolicyVersion(9), weights=of(blue=9.0), past={5: of(red=5.0, blue=5.0), 7: of(red=7.0)}
    )
    read = FleetState.from_bytes(state.to_bytes())
    for after, expected in (
        (4, {5: {"red": 5, "blue": 5}, 7: {"red": 7}, 9: {"blue": 9}}),
        (5, {9: {"red": 7, "blue": 9}}),
        (9, {}),
    ):
        blobs = read.publishes(after=after)
        found = {
            version: {model: one["number"] for model, one in blob.weights().items()} for version, blob in blobs.items()
        }
        assert found == expected


@pytest.mark.parametrize("data", [b"", b"x" * 100, STATE.to_bytes()[:-1]])
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match=f"these {len(data)} bytes are not a fleet's state"):
        FleetState.from_bytes(data)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=4,
)
MOMENTS = st.dictionaries(st.sampled_from(["count", "mean", "m2", "clip"]), JSON, max_size=4)
STATISTICS = st.dictionaries(st.sampled_from(["1", "-1", "x"]), st.dictionaries(st.just("obs"), MOMENTS, max_size=1))
DOCUMENTS = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {"format": st.sampled_from([1, 2]), "frames": JSON, "version": JSON, "attempts": JSON, "seed": JSON},
        optional={"statistics": st.one_of(STATISTICS, JSON)},
    ),
    st.fixed_dictionaries({"format": st.just(1), "envs_saved": JSON, "warmup_left": JSON}),
).map(json.dumps)


@given(text=st.one_of(DOCUMENTS, st.just("[" * 5000), st.text(max_size=9)))
def test_metadata_that_lies_raises_a_state_error_only(text: str) -> None:
    for key, read in (("cormorant_fleet", FleetState.from_bytes), ("cormorant", read_metadata)):
        data = safetensors.numpy.save({"weights": np.zeros(1, np.uint8)}, metadata={key: text})
        with suppress(StateError):
            read(data)
