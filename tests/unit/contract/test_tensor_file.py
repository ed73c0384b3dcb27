"""Safetensors headers: ours against the library's, and what a hostile sender may write."""

import json
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cormorant_client import PulledWeights
from cormorant_contract.tensor_file import NUMPY_NAMES, MalformedTensorFile, make_header, parse_header

NAMES = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "bool": "BOOL", "int32": "I32"}
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
arrays = hnp.arrays(st.sampled_from(sorted(NAMES)), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))


@given(
    tensors=st.dictionaries(names, arrays, max_size=4),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_the_library_reads_what_we_write(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    header, file = make_header(((name, NAMES[a.dtype.name], a.shape) for name, a in tensors.items()), metadata)
    data = header + b"".join(array.tobytes() for array in tensors.values())
    assert len(header) % 64 == 0
    assert (file.data_start, file.size_bytes) == (len(header), len(data))
    read = safetensors.numpy.load(data)
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array, strict=True)
    again = parse_header(data)
    assert (again.tensors, again.metadata) == (file.tensors, metadata)


def file_of(header: object, *, payload: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(payload)


def tensor(begin: object = 0, end: object = 8, *, dtype: object = "F32", shape: object = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "of 0 bytes, the header claims 8; at most"),
        (file_of({"a": tensor()}, length=2**63), "at most 16,777,216 are read"),
        (file_of({"a": tensor()}, length=1000), "the header claims 1,008"),
        (file_of(b"\xff\xfe"), "the header is not JSON"),
        (file_of(b"[" * 100_000), "the header is not JSON"),
        (file_of([1]), "a JSON list, not an object"),
        (file_of(b'{"a":1,"a":2}'), 'names "a" twice'),
        (file_of(b'{"a":NaN}'), "must have dtype"),
        (file_of({"__metadata__": {"a": 1}}, payload=0), "must map strings to strings"),
        (file_of({"a": {"dtype": "F32"}}), "must have dtype, shape and data_offsets"),
        (file_of({"a": tensor(dtype="object")}), "dtype 'object' is not one of"),
        (file_of({"a": tensor(dtype=["F32"])}), "is not one of"),
        (file_of({"a": tensor(shape=[True, 2])}), "must be at most 64 integers from 0 to"),
        (file_of({"a": tensor(shape=[-2])}), "must be at most 64 integers from 0 to"),
        (file_of({"a": tensor(shape=[2**62, 2**62])}), "has more than 2\\*\\*63 - 1 bytes"),
        (file_of({"a": tensor(0, 0, shape=[0, 2**62, 2**62])}, payload=0), "has more than 2\\*\\*63 - 1 bytes"),
        (file_of({"a": tensor(shape=[2**63])}), r"shape \[9223372036854775808\] must be at most 64 integers from 0 to"),
        (file_of({"a": tensor(shape=[1] * 65)}), r"shape \[1, 1, 1, 1, 1, 1, \.\.\.\] must be at most 64 integers"),
        (file_of(b'{"\\ud800":1}'), "the header is not JSON"),
        (file_of({"a": tensor(8, 0)}), r"hold -8 bytes"),
        (file_of({"a": tensor(), "b": tensor(4, 12)}, payload=12), "begins at 4, and the one before it ends at 8"),
        (file_of({"a": tensor(), "b": tensor(12, 20)}, payload=20), "begins at 12, and the one before it ends at 8"),
        (file_of({"a": tensor()}, payload=9), "the tensors take 8 bytes, 9 follow"),
        (file_of({"a": tensor()}, payload=7), "must be two integers from 0 to 7, the bytes that follow"),
        (file_of(b'{"a":' + b"9" * 5000 + b"}"), "the header is not JSON"),
    ],
)
def test_headers_that_lie_are_refused_with_a_sentence(data: bytes, message: str) -> None:
    with pytest.raises(MalformedTensorFile, match=message) as caught:
        parse_header(data)
    assert caught.value.offset >= 0


SIZES = st.one_of(
    st.integers(0, 5), st.sampled_from([-1, 2**31, 2**62, 2**63 - 1, 2**63, 10**4000, 1e999, 1.0, True, None, [[]]])
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "U8", "BF16", "C64", "F128"]), SIZES),
        "shape": st.one_of(st.lists(SIZES, max_size=4), st.lists(st.just(1), min_size=60, max_size=70), SIZES),
        "data_offsets": st.one_of(st.lists(SIZES, min_size=2, max_size=2), st.just([0, 8]), SIZES),
    },
    optional={"more": SIZES},
)
HEADERS = st.dictionaries(
    st.sampled_from(["a", "policy/b", "", "__metadata__", "\ud800", "\0"]), st.one_of(ENTRIES, SIZES), max_size=3
)


@given(header=HEADERS, payload=st.sampled_from([0, 4, 8, 12]), cut=st.integers(0, 12))
def test_what_the_parser_takes_the_readers_take(header: dict[str, Any], payload: int, cut: int) -> None:
    data = file_of(header, payload=payload)
    data = data[: len(data) - cut] if cut > 8 else data
    try:
        file = parse_header(data)
    except MalformedTensorFile:
        return
    safetensors.deserialize(data)
    pulled = PulledWeights("policy", 1, memoryview(data))
    found = pulled.state_dict()
    assert [tuple(tensor.shape) for tensor in found.values()] == [entry.shape for entry in file.tensors.values()]
    if all(entry.dtype in NUMPY_NAMES for entry in file.tensors.values()):
        assert pulled.numpy().keys() == found.keys()


def test_only_the_header_is_needed() -> None:
    header, file = make_header([("a", "F32", (1000, 1000))])
    assert parse_header(header, file_size=file.size_bytes).tensors == file.tensors
    with pytest.raises(MalformedTensorFile, match="two integers from 0 to 0, the bytes that follow"):
        parse_header(header)
