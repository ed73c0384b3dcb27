"""Weights as bytes: what the reference library reads is what was given."""

from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from cormorant_client.errors import WeightsError
from cormorant_client.publishing import PulledWeights, make_body


def loaded(weights: Any, **options: Any) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(b"".join(make_body(weights, **options).pieces))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32,
    torch.int64, torch.float64,
]  # fmt: skip


def test_every_dtype_and_shape_arrives() -> None:
    given = {f"{dtype}": torch.ones(3, 2).to(dtype) for dtype in DTYPES}
    given |= {"scalar": torch.tensor(7.5), "empty": torch.zeros(0, 3), "turned": torch.arange(6.0).view(2, 3).t()}
    arrays = {"array": np.arange(4, dtype=np.int32), "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    expected = given | {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert_equal(loaded(given | arrays), {name: tensor.contiguous() for name, tensor in expected.items()})


def test_modules_tied_weights_and_several_models() -> None:
    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    second.weight = first.weight
    module = nn.Sequential(first, second)
    assert_equal(loaded(module), dict(module.state_dict()))
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
    assert copied.size_bytes == body.size_bytes


def test_pulled_weights_are_views_and_load_into_a_module() -> None:
    module = nn.Linear(3, 2).to(torch.bfloat16)
    data = memoryview(bytearray(b"".join(make_body({"policy": module}).pieces)))
    pulled = PulledWeights.read("policy", 4, '"4:x"', data)
    assert pulled.version == 4
    assert_equal(pulled.state_dict(), dict(module.state_dict()))
    nn.Linear(3, 2).load_state_dict(pulled.state_dict())
    with pytest.raises(WeightsError, match="state_dict"):
        pulled.numpy()
    data = memoryview(bytearray(b"".join(make_body({"w": torch.arange(3.0)}).pieces)))
    assert PulledWeights.read("policy", 1, "", data).numpy()["w"].tolist() == [0, 1, 2]
    with pytest.raises(WeightsError):
        PulledWeights.read("policy", 1, "", memoryview(b"nothing of the kind"))


def test_an_extra_state_is_left_out() -> None:
    class Remembering(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 7}

    module = nn.ModuleDict({"inner": Remembering(2, 3)})
    assert sorted(loaded(module)) == ["inner.bias", "inner.weight"]
    assert sorted(loaded({"actor": module})) == ["actor/inner.bias", "actor/inner.weight"]
