"""Weights as one file in shared memory: written in place, read as views, checked from the header."""

import gc
import json

import psutil
import pytest
import safetensors.torch
import torch

from cormorant_contract.tensor_file import make_header
from cormorant_worker.errors import MalformedWeights, WeightsError, WeightsMismatch
from cormorant_worker.weights.blob import WeightsBlob, read_weights, to_bytes
from cormorant_worker.weights.staged import StagedWeights, specs_of_tensors, verify

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def received(data: bytes, default_model: str = "policy") -> WeightsBlob:
    """What the head does with a request's body."""
    blob = WeightsBlob(len(data))
    blob.buffer[:] = data
    return blob.check(default_model)


def test_blob_reads_back_in_the_reference_library() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).T
    tied = torch.ones(3)
    weights = {
        "policy": {"transposed": transposed, "tied": tied, "again": tied, "one": torch.tensor(3.0)},
        "critic": {"empty": torch.zeros(0, 4), **{str(d): torch.arange(5).to(d) for d in DTYPES}},
    }
    blob = WeightsBlob.of(weights)
    for found in (blob.weights(), received(bytes(blob.buffer)).weights(), read_weights(memoryview(to_bytes(weights)))):
        assert {m: set(t) for m, t in found.items()} == {m: set(t) for m, t in weights.items()}
        for model, tensors in weights.items():
            for name, tensor in tensors.items():
                theirs = found[model][name]
                assert theirs.dtype == tensor.dtype, name
                assert theirs.shape == tensor.shape
                assert theirs.tolist() == tensor.tolist(), name
    reference = safetensors.torch.load(bytes(blob.buffer))
    assert torch.equal(reference["policy/transposed"], transposed)
    assert len(reference) == 4 + 1 + len(DTYPES)
    assert blob.specs == specs_of_tensors(weights)


def test_tensors_are_views_that_keep_their_memory_alive() -> None:
    def descriptors() -> int:
        gc.collect()
        return psutil.Process().num_fds()

    before = descriptors()
    blob = received(safetensors.torch.save({"a": torch.ones(1000)}))
    view = blob.weights()["policy"]["a"]
    blob.buffer[-4:] = bytes(4)
    assert view[-1] == 0  # the same memory
    del blob
    gc.collect()
    assert view.sum() == 999
    assert descriptors() > before
    del view
    assert descriptors() == before


def test_plain_names_are_the_default_models() -> None:
    data = safetensors.torch.save({"weight": torch.ones(2), "policy/weight": torch.zeros(2)})
    blob = received(data, "critic")
    assert {model: set(names) for model, names in blob.tensors.items()} == {"critic": {"weight"}, "policy": {"weight"}}
    assert read_weights(memoryview(data), default_model="critic", models=["critic"])["critic"]["weight"].sum() == 2
    with pytest.raises(MalformedWeights, match="the weights contain policy/weight twice"):
        received(data)


def test_tensors_at_odd_offsets_are_read_all_the_same() -> None:
    header, _ = make_header([("a", "U8", (3,)), ("b", "F64", (2,))])
    data = header + bytes([1, 2, 3]) + torch.tensor([1.5, -2.5], dtype=torch.float64).numpy().tobytes()
    assert received(data).weights()["policy"]["b"].tolist() == [1.5, -2.5]
    shifted = bytearray(1) + bytearray(data)  # as a view of others' memory may be
    assert read_weights(memoryview(shifted)[1:])["policy"]["b"].tolist() == [1.5, -2.5]


def test_a_fault_in_the_header_says_where_it_lies() -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}).encode()
    with pytest.raises(MalformedWeights, match='tensor "a" begins at 4 and leaves a gap') as caught:
        received(len(text).to_bytes(8, "little") + text + bytes(12))
    assert caught.value.offset == 8 + len(text)


def test_the_header_alone_tells_what_does_not_fit() -> None:
    specs = StagedWeights({"policy": torch.nn.Linear(2, 3)}).specs
    fits = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    verify(WeightsBlob.of({"policy": fits}).specs, specs)
    wrong = {"weight": torch.ones(2, 3), "extra": torch.ones(1), "bias": torch.ones(3, dtype=torch.float64)}
    words = (
        r"3 tensors .*: unexpected: policy/extra; shape: policy/weight is \[2, 3\], not \[3, 2\]; .* is float64, not"
    )
    with pytest.raises(WeightsMismatch, match=words):
        verify(WeightsBlob.of({"policy": wrong}).specs, specs)
    many = {f"t{i}": torch.ones(1) for i in range(30)}
    with pytest.raises(WeightsMismatch, match=r"32 tensors do not fit.* and 12 more; nothing was applied"):
        verify(WeightsBlob.of({"policy": many}).specs, specs)


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"policy/a is torch.complex128, which safetensors cannot hold"):
        WeightsBlob.of({"policy": {"a": torch.ones(1, dtype=torch.complex128)}})
