"""Declared keys of info in a collector's batches, and what cannot be stored."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cormorant_testing.collecting import make_job
from cormorant_testing.envs import CountingEnv
from cormorant_testing.info import INFO, assert_info
from cormorant_testing.vectors import step_times
from cormorant_worker.envs.gymnasium_env import MadeEnvs
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.inline import InlineVectorEnv
from cormorant_worker.errors import CormorantError, EnvCrashed
from cormorant_worker.launch import make_collector


def test_info_belongs_to_its_own_step_and_is_padded_with_zeros() -> None:
    job = make_job(num_envs=3, lengths=(4, 3, 7), ends="alternate", info=INFO, collection={"framesPerBatch": 30})
    with make_collector(job) as collector:
        for frames in (30, 7, 30):
            assert_info(collector.collect(num_steps=frames))
        assert_info(collector.collect(num_episodes=7))


@pytest.mark.parametrize(
    ("field", "info", "sentence"),
    [
        ({"key": "succes"}, {}, r"succes is in the info of neither .* where even, nested, pair, step"),
        ({"key": "word"}, {"word": "yes"}, "word is of type str96; numbers, booleans and arrays of them are stored"),
        ({"key": "word", "dtype": "float32", "shape": []}, {"word": "yes"}, "returned str 'yes' for word, which is no"),
        ({"key": "pair", "shape": [3]}, {}, r"pair has the shape \[2\], declared is \[3\]"),
        ({"key": "pair", "dtype": "int16", "shape": [3]}, {}, r"returned pair of shape \[2\]; env.info says \[3\]"),
        ({"key": "big", "dtype": "uint8"}, {"big": 300}, "returned big that does not fit uint8: 300 .* stored as 44"),
        ({"key": "even", "fill": 2}, {}, "fill 2 of even does not fit bool"),
    ],
)
def test_info_that_cannot_be_stored_gets_a_sentence(
    field: Mapping[str, Any], info: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(CormorantError, match=sentence), make_collector(make_job(info=[field], shown=info)) as built:
        built.collect(num_steps=4)


@pytest.mark.parametrize(
    ("dtype", "value", "sentence"),
    [
        ("float32", 1e300, r"far that does not fit float32: 1e\+300 .* stored as inf"),
        ("float64", 10**400, "far that does not fit float64: int too large"),
        ("int64", 2**70, r"far that does not fit int64: 1\.1805\d*e\+21 .* declare another dtype"),
    ],
)
def test_numbers_that_do_not_fit_are_not_stored(dtype: str, value: Any, sentence: str) -> None:
    for shape, shown in ((), value), ((2,), [value, 0]):
        field = InfoField(key="far", dtype=dtype, shape=shape)
        env = InlineVectorEnv(MadeEnvs([lambda: CountingEnv(shown={"far": shown})]), seeds=[1], info=[field])  # noqa: B023
        env.start()
        with pytest.raises(EnvCrashed, match=sentence):
            step_times(env, 1)


@pytest.mark.parametrize(
    ("value", "dtype", "stored"),
    [
        (np.float64(0.1), "float32", np.float32(0.1)),
        ([2**70, 1], "float32", np.array([2**70, 1], np.float32)),
        (np.nan, "float32", np.float32(np.nan)),
        (np.array([np.inf, 1e38]), "float32", np.array([np.inf, 1e38], np.float32)),
        (np.array([1, 0]), "bool", np.array([True, False])),
        (np.uint8(255), "", np.uint8(255)),
        (2**70, "", np.float64(2**70)),
    ],
)
def test_numbers_are_stored_as_the_declared_dtype_or_their_own(value: Any, dtype: str, stored: Any) -> None:
    field = InfoField(key="a", dtype=dtype, shape=np.shape(value) if dtype else None)
    env = InlineVectorEnv(MadeEnvs([lambda: CountingEnv(shown={"a": value})]), seeds=[1], info=[field])
    env.start()
    found = step_times(env, 1).info[0]
    assert found.dtype == env.info_leaves[0].dtype == stored.dtype
    np.testing.assert_array_equal(found[0], stored)
