"""Batches and weights as bytes: what the client decodes is what the worker hands to learners in its own process, every
key, value, dtype and shape; what the reference library reads is what was published.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from cormorant_client.delivery import Delivery, decode
from cormorant_client.errors import BadBatch, WeightsError
from cormorant_client.publishing import PulledWeights, make_body
from cormorant_contract.tensor_file import ITEM_BYTES, parse_header
from cormorant_postproc import MultiStep, split_trajectories
from cormorant_testing.collecting import SEEDS, assert_same, make_collector
from cormorant_testing.envs import ACTION_SPACES, OBSERVATION_SPACES
from cormorant_testing.policies import numbered
from cormorant_testing.serving import weights_file
from cormorant_worker.collect.batch import stack_workers, to_tensordict
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.batch_file import encode
from cormorant_worker.fleet.batch_queue import Loan, LoanPart


def blocks_of(quotas: Sequence[Sequence[int]], *, index: int = 0, **options: object) -> list[Block]:
    """Blocks that one collector fills one after another; quotas are frames of each environment."""
    seeds = WorkerPlace(seed=SEEDS.seed, index=index)
    with make_collector(num_envs=len(quotas[0]), seeds=seeds, **options) as collector:
        layout = collector.layout(max(max(quota) for quota in quotas))
        blocks = [Block(layout, bytearray(b"\1" * layout.size_bytes)) for _ in quotas]  # used before
        for block, quota in zip(blocks, quotas, strict=True):
            collector.fill_columns(block, np.array(quota))
        return blocks


def lent(*blocks: Block, mode: str = "async", **options: Any) -> tuple[Loan, bytes]:
    """Blocks as the worker hands them out, and the bytes that it sends."""
    loan = Loan(
        tuple(LoanPart(worker=f"cpu-{i}", attempt=i, block=block, memory=None) for i, block in enumerate(blocks)),
        mode=mode, num_frames=sum(block.num_frames for block in blocks), min_version=2, max_version=5,
        storing_device="cpu", on_copied=lambda: None, on_release=lambda: None, **options,
    )  # fmt: skip
    return loan, b"".join(encode(loan, batch_id="e-4", delivery=2))


def decoded(data: bytes) -> Delivery:
    return decode(memoryview(bytearray(data)))


@given(
    quotas=st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=2), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    recurrent=st.booleans(),
)
@settings(max_examples=30)
def test_columns_and_workers_of_any_length(quotas: list[list[int]], lengths: list[int], recurrent: bool) -> None:
    options = {"lengths": lengths, "policy": "counter"} if recurrent else {"lengths": lengths}
    blocks = [
        block for index, quota in enumerate(quotas) for block in blocks_of([quota, quota], index=index, **options)[1:]
    ]
    _, data = lent(*blocks, mode="sync")  # before to_tensordict, which zeroes the padding of its block
    assert_same([decoded(data).tensordict()], [stack_workers([to_tensordict(block) for block in blocks])])


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (3, 1, 7)},
        {"lengths": 99},
        {"policy": "counter", "lengths": (3, 1)},
        {"policy": "with_outputs"},
        *({"observation": name, "lengths": (2, 3), "ends": "alternate"} for name in sorted(OBSERVATION_SPACES)),
        *({"action": name} for name in sorted(ACTION_SPACES)),
    ],
    ids=str,
)
def test_the_workers_encoder_and_this_decoder_agree(options: dict[str, object]) -> None:
    blocks = [block for index in range(2) for block in blocks_of([(5, 5, 5), (4, 3, 2)], index=index, **options)]
    for chosen, mode in ((blocks[:1], "async"), (blocks[1:2], "async"), (blocks, "sync")):
        loan, data = lent(*chosen, mode=mode)
        batch = decoded(data)
        assert_same([batch.tensordict()], [loan.tensordict()])
        assert (batch.id, batch.delivery, batch.min_version, batch.max_version) == ("e-4", 2, 2, 5)
        assert (batch.num_frames, batch.mode) == (loan.num_frames, mode)
        assert [(part.worker, part.attempt) for part in batch.parts] == [(f"cpu-{i}", i) for i in range(len(chosen))]


def test_bytes_are_not_copied_where_no_trajectory_ended() -> None:
    data = np.frombuffer(bytearray(lent(*blocks_of([(4, 4)], lengths=99))[1]), np.uint8)
    nested = decode(memoryview(data)).numpy()
    for array in (nested["observation"], nested["next"]["observation"], nested["action"], nested["next"]["reward"]):
        assert np.shares_memory(array, data)


def test_bytes_that_may_not_be_written_are_copied() -> None:
    block = blocks_of([(4, 2)])[0]
    assert_same([decode(memoryview(lent(block)[1])).tensordict()], [to_tensordict(block)])


def test_a_worker_without_a_step_takes_its_place() -> None:
    first, second = blocks_of([(3, 3)])[0], blocks_of([(3, 3)], index=1)[0]
    second.num_rows = second.num_ends = 0
    second.lengths[:] = 0
    found = decoded(lent(first, second, mode="sync")[1]).tensordict()
    assert found.shape == (4, 3)
    assert found["collector", "mask"].sum(1).tolist() == [3, 3, 0, 0]
    assert not found["next", "observation"][2:].any()


def test_the_reference_library_reads_the_same_file() -> None:
    """Learners of any version read it."""
    block = blocks_of([(6, 6), (4, 3)], policy="counter", lengths=(3,))[1]
    _, data = lent(block)
    described = json.loads(parse_header(data).metadata["cormorant_batch"])
    part = {"worker": "cpu-0", "attempt": 0, "num_envs": 2, "num_steps": 4, "num_ends": 2, "frames": 7}
    assert described == {
        "format": 1, "id": "e-4", "frames": 7, "num_steps": 4, "min_version": 2, "max_version": 5, "mode": "async",
        "delivery": 2, "parts": [part],
    }  # fmt: skip
    expected = {
        "observation": block.observation[0][:5],
        "count": block.states[0][:5],
        "action": block.action[0][:4],
        "drawn": block.outputs[0][:4],
        "is_init": block.is_init[:4],
        "next/reward": block.reward[:4],
        "next/terminated": block.terminated[:4],
        "next/truncated": block.truncated[:4],
        "collector/traj_ids": block.traj_ids[:4],
        "collector/policy_version": block.policy_version[:4],
        "collector/lengths": block.lengths,
        "ends/time": block.end_rows[:2],
        "ends/env": block.end_columns[:2],
        "final/observation": block.final[0][:2],
        "final/count": block.final_states[0][:2],
    }
    loaded = safetensors.numpy.load(data)
    assert loaded.keys() == {f"0/{name}" for name in expected}
    for name, array in expected.items():
        np.testing.assert_array_equal(loaded[f"0/{name}"], array, strict=True)
    padded = [array[-1, 1] for array in loaded.values() if array.shape[:2] in ((4, 2), (5, 2))]
    assert (len(padded), np.any([array.any() for array in padded])) == (10, False), "what an earlier batch left behind"


def test_nothing_is_copied_and_bulk_begins_at_round_offsets() -> None:
    block = blocks_of([(32, 32)], observation="image")[0]
    wire = encode(lent(block)[0], batch_id="0-0", delivery=1)
    block.observation[0][0, 0] = 77
    data = b"".join(wire)
    assert (safetensors.numpy.load(data)["0/observation"][0, 0] == 77).all()
    file = parse_header(data)
    for entry in file.tensors.values():
        alignment = ITEM_BYTES[entry.dtype] if (entry.end - entry.begin) % 64 else 64
        assert (file.data_start + entry.begin) % alignment == 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"parts": []}, "no steps"),
        (
            {"parts": [{"worker": "a", "attempt": 0, "num_envs": 9, "num_steps": 4, "num_ends": 0, "frames": 1}]},
            "shape",
        ),
        ({"parts": [{"worker": "a"}]}, "num_steps"),
        ({"frames": "many"}, "many"),
    ],
)
def test_metadata_that_does_not_fit_is_told(change: dict[str, object], word: str) -> None:
    described = json.loads(parse_header(SMALL).metadata["cormorant_batch"]) | change
    data = safetensors.numpy.save(safetensors.numpy.load(SMALL), {"cormorant_batch": json.dumps(described)})
    with pytest.raises(BadBatch, match=word):
        decoded(data)


@pytest.mark.parametrize("data", [b"", b"{}", (2).to_bytes(8, "little") + b"{}", b"\x80\x04pickle" * 20])
def test_other_bytes_are_no_batch(data: bytes) -> None:
    with pytest.raises(BadBatch):
        decode(memoryview(data))


@given(st.data())
@settings(max_examples=60)
def test_bytes_that_were_hurt_are_told_or_read(data: st.DataObject) -> None:
    whole = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.integers(8, len(whole))) :]
    with suppress(BadBatch):  # any other error fails the test
        decode(memoryview(whole))


_, SMALL = lent(*blocks_of([(2, 2)]))


def test_post_processing_travels_with_the_batch() -> None:
    block = blocks_of([(5, 5, 5)], lengths=(3, 1, 7))[0]
    asked = {"multi_step": {"steps": 2, "gamma": 0.5}, "split_trajectories": True}
    loan, data = lent(block, post_processing=asked)
    expected = split_trajectories(MultiStep(gamma=0.5, n_steps=2)(to_tensordict(block)))
    assert_same([loan.tensordict()], [expected])
    batch = decoded(data)
    assert_same([batch.tensordict()], [expected])
    assert batch.numpy()["next"]["reward"].shape == (3, 5, 1)  # as they were collected


def loaded(weights: Any, **options: Any) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(b"".join(make_body(weights, **options).pieces))


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32,
    torch.int64, torch.float64,
]  # fmt: skip


def test_every_dtype_and_shape_arrives() -> None:
    given = {f"{dtype}": torch.ones(3, 2).to(dtype) for dtype in DTYPES}
    given |= {"scalar": torch.tensor(7.5), "empty": torch.zeros(0, 3), "turned": torch.arange(6.0).view(2, 3).t()}
    arrays = {"array": np.arange(4, dtype=np.int32), "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    expected = given | {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert_close(loaded(given | arrays), expected, rtol=0, atol=0)


def test_modules_tied_weights_and_several_models() -> None:
    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    second.weight = first.weight
    module = nn.Sequential(first, second)
    assert_close(loaded(module), dict(module.state_dict()), rtol=0, atol=0)
    assert make_body(module).pieces == make_body(module.state_dict()).pieces, "equal weights are equal bytes"
    body = make_body({"actor": nn.Linear(2, 1), "critic": {"w": torch.ones(2)}})
    assert body.model == ""
    assert set(safetensors.torch.load(b"".join(body.pieces))) == {"actor/weight", "actor/bias", "critic/w"}


def test_tensors_are_not_copied_and_a_copy_is_independent() -> None:
    tensor = torch.zeros(1000)
    body = make_body({"a": tensor})
    copied = body.copied()
    tensor.fill_(5)
    assert safetensors.torch.load(b"".join(body.pieces))["a"][0] == 5
    assert safetensors.torch.load(b"".join(copied.pieces))["a"][0] == 0


def test_pulled_weights_are_views_and_load_into_a_module() -> None:
    module = nn.Linear(3, 2).to(torch.bfloat16)
    data = memoryview(bytearray(b"".join(make_body({"policy": module}).pieces)))
    pulled = PulledWeights("policy", 4, data)
    assert pulled.version == 4
    assert_close(pulled.state_dict(), dict(module.state_dict()), rtol=0, atol=0)
    nn.Linear(3, 2).load_state_dict(pulled.state_dict())
    with pytest.raises(WeightsError, match="state_dict"):
        pulled.numpy()
    data = memoryview(bytearray(b"".join(make_body({"w": torch.arange(3.0)}).pieces)))
    assert PulledWeights("policy", 1, data).numpy()["w"].tolist() == [0, 1, 2]
    with pytest.raises(WeightsError):
        PulledWeights("policy", 1, memoryview(b"nothing of the kind"))


def test_metadata_of_a_file_is_its_own() -> None:
    with pytest.raises(WeightsError, match="cannot be added to a safetensors file; save the file with its metadata"):
        make_body(weights_file(1), metadata={"updates": "3"})
    (piece, *_) = make_body({"a": numbered(1), "b": numbered(2)}, metadata={"updates": "3"}).pieces
    assert parse_header(piece, file_size=len(piece) + 32).metadata == {"updates": "3"}
