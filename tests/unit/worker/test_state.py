"""States of a collector, and of a whole fleet, as bytes."""

import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from cormorant_postproc import frames_of
from cormorant_testing.collecting import assert_same, make_collector
from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.state import read_metadata
from cormorant_worker.errors import StateError
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.weights.blob import to_bytes
from cormorant_worker.weights.staged import PolicyVersion

IDS = ("collector", "traj_ids")


def batches(collector: Collector, sizes: list[int]) -> list[TensorDict]:
    return [collector.collect(num_steps=size) for size in sizes]


def ids_of(batch: TensorDict) -> list[int]:
    return frames_of(batch)[IDS].tolist()


@given(
    policy=st.sampled_from(["", "counter", "cormorant.policies:lstm", "cormorant.policies:mlp"]),
    before=st.lists(st.integers(1, 20), max_size=3),
    after=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    env_groups=st.integers(1, 2),
    resets=st.booleans(),
    warmup=st.sampled_from([0, 25]),
    max_frames=st.sampled_from([0, 3]),
    in_place=st.booleans(),
)
@settings(max_examples=30)
def test_a_restored_collector_goes_on_bit_by_bit(
    policy: str,
    before: list[int],
    after: list[int],
    env_groups: int,
    resets: bool,
    warmup: int,
    max_frames: int,
    in_place: bool,
) -> None:
    options = {"env_groups": env_groups, "policy": policy, "resets": resets, "max_frames": max_frames}
    options |= {"lengths": (3, 1, 5), "warmup": warmup if policy else 0}
    first = make_collector(**options)
    batches(first, before)
    saved = first.state()
    expected = batches(first, after)
    second = first if in_place else make_collector(**options)
    own = expected if in_place else batches(second, [11])
    second.restore(saved)  # whatever it did before is forgotten, but for the ids that it used
    found = batches(second, after)
    assert_same(found, expected, but=[IDS])
    # The same trajectories, one to one, and not one id that it used before.
    pairs = {pair for both in zip(found, expected, strict=True) for pair in zip(*map(ids_of, both), strict=True)}
    ours, theirs = map(set, zip(*pairs, strict=True))
    assert len(ours) == len(pairs) == len(theirs)
    assert not ours & {one for batch in own for one in ids_of(batch)}
    assert second.frames == sum(before) + sum(after)


def test_restore_in_place_keeps_open_trajectories() -> None:
    for is_new in (False, True):
        first, second = make_collector(lengths=5), make_collector(lengths=5)
        saved = [batches(collector, [9]) and collector.state() for collector in (first, second)]
        target = make_collector(lengths=5) if is_new else second
        target.restore(saved[1])
        assert_same(batches(target, [20]), batches(first, [20]))


def test_restored_trajectories_past_a_lower_limit_end_with_their_next_frame() -> None:
    first, second = make_collector(lengths=50), make_collector(lengths=50, max_frames=3)
    first.collect(num_steps=15)
    second.restore(first.state())
    one, other = (second.collect(num_steps=num_steps) for num_steps in (1, 12))
    truncated = [batch["next", "truncated"].squeeze(-1).int().tolist() for batch in (one, other)]
    assert truncated == [[[1], [0], [0]], [[0, 0, 1, 0], [1, 0, 0, 1], [1, 0, 0, 1]]]


def test_restarted_environments_keep_their_seeds_in_a_state() -> None:
    seeds = make_collector()._config.seeds.env_seeds(3)
    options = {"lengths": 50, "failures": [{"how": "raise", "step": 4, "seeds": seeds}]}
    first = make_collector(**options)
    first.collect(num_steps=24)
    saved = first.state()
    second = make_collector(**options)
    second.restore(saved)
    assert second.env_restarts == 3
    assert_same(batches(second, [30]), batches(first, [30]))


def test_the_learners_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    make_collector(policy="counter").collect(num_steps=30)
    assert torch.equal(torch.rand(4), expected)
    again = make_collector(policy="counter")
    torch.manual_seed(99)
    assert_same(batches(again, [30]), batches(make_collector(policy="counter"), [30]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_envs": 2}, "num_envs is 3, this collector's is 2"),
        ({"policy": "counter"}, "layout is observation float32"),
        ({"env_groups": 2}, r"groups of \[3\], .* groups of \[2, 1\]: only one of both has inference servers"),
    ],
)
def test_state_of_another_collector_is_refused(options: dict, words: str) -> None:
    saved = make_collector().state()
    other, control = make_collector(**options), make_collector(**options)
    with pytest.raises(StateError, match=words):
        other.restore(saved)
    assert_same(batches(other, [10]), batches(control, [10]))


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


def test_older_weights_travel_with_the_first_newer_publish() -> None:
    def of(**models: float) -> bytes:
        return to_bytes({model: {"number": torch.tensor(value)} for model, value in models.items()})

    state = replace(
        STATE, version=PolicyVersion(9), weights=of(blue=9.0), past={5: of(red=5.0, blue=5.0), 7: of(red=7.0)}
    )
    read = FleetState.from_bytes(state.to_bytes())
    for after, expected in (
        (4, {5: {"red": 5, "blue": 5}, 7: {"red": 7}, 9: {"blue": 9}}),
        (5, {7: {"red": 7}, 9: {"blue": 9}}),
        (7, {9: {"red": 7, "blue": 9}}),
        (9, {}),
    ):
        blobs = read.publishes(after=after)
        found = {
            version: {model: one["number"] for model, one in blob.weights().items()} for version, blob in blobs.items()
        }
        assert found == expected


@pytest.mark.parametrize("data", [b"", b"x" * 100, STATE.to_bytes()[:-1], b"\x10" + bytes(7) + b"{}" + b" " * 14])
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match=f"these {len(data)} bytes are not a fleet's state"):
        FleetState.from_bytes(data)
    with pytest.raises(StateError, match="not a collector's state"):
        read_metadata(data)


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
