"""An empty argument is never taken for one that is not given, and one of a wrong type is refused where it is given."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cormorant
from cormorant.errors import (
    BadAddress,
    ClientError,
    CormorantError,
    DatasetError,
    FleetError,
    ManifestError,
    PolicyLoadError,
    WeightsError,
)
from manifest_making import collector_job

MANIFEST = collector_job(
    "pole",
    {
        "env": {"gymnasium": {"id": "CartPole-v1"}},
        "policy": {"random": {}},
        "collection": {"framesPerBatch": 8},
        "output": {"queue": {}},
    },
)
CLIENT = cormorant.connect("http://127.0.0.1:9", token="t")  # sends nothing

CALLS: dict[str, tuple[Callable[..., Any], type[Exception], dict[str, tuple[Any, ...]]]] = {
    "open_fleet": (
        partial(cormorant.open_fleet, env="CartPole-v1"),
        ManifestError,
        {"storing_device": ("", 0), "options": ("", ()), "engine": ("",)},
    ),
    "evaluate": (
        partial(cormorant.evaluate, env="CartPole-v1", episodes=1),
        ManifestError,
        {"weights": ("", ()), "directory": ("", 0), "engine": ("", 0)},
    ),
    "make_collector": (
        partial(cormorant.make_collector, env="CartPole-v1"),
        ManifestError,
        {"device": ("", 0), "name": ("",), "collection": ("", ()), "policy_factory": ("", 0),
         "vectorization_mode": ("",)},
    ),
    "open_fleet of a manifest": (
        partial(cormorant.open_fleet, MANIFEST), ManifestError, {"name": ("",), "device": ("", 0)}
    ),
    "load_job": (partial(cormorant.load_job, MANIFEST), ManifestError, {"name": ("",)}),
    "load_job of nothing": (cormorant.load_job, ManifestError, {"manifest": ("", 0, ())}),
    "read_dataset": (cormorant.read_dataset, DatasetError, {"uri": ("", 0, ())}),
    "FleetOptions": (cormorant.FleetOptions, ManifestError, {"device": ("", ()), "hang_timeout_s": (0, 0.0)}),
    "RayOptions": (
        cormorant.RayOptions, ManifestError, {"address": ("",), "object_store_bytes": (0,)}
    ),
    "connect": (
        partial(cormorant.connect, "http://127.0.0.1:9"),
        BadAddress,
        dict.fromkeys(("namespace", "context", "token", "token_file", "ca_file", "ca_data", "server_name"), ("",))
        | {"timeout_s": (0,)},
    ),
    "connect to a job": (
        partial(cormorant.connect, "pong"), BadAddress, {"namespace": ("",), "token": ("",), "timeout_s": (0,)}
    ),
    "connect to nothing": (cormorant.connect, BadAddress, {"head": ("", 0)}),
    "AsyncClient": (cormorant.aio.AsyncClient, BadAddress, {"url": ("",), "token": ("",)}),
    "pause": (CLIENT.pause, FleetError, {"owner": ("",), "ttl": (0,)}),
    "resume": (CLIENT.resume, FleetError, {"owner": ("",)}),
    "batches": (CLIENT.batches, FleetError, {"consumer": ("",), "frames": (0,), "memory": ("",)}),
    "publish": (partial(CLIENT.publish, {}), WeightsError, {"model": ("",)}),
    "rollback": (CLIENT.rollback, FleetError, {}),
    "seed": (CLIENT.seed, FleetError, {}),
    "streaming_split": (CLIENT.streaming_split, FleetError, {}),
    "LearnerLink of a collector": (partial(cormorant.LearnerLink, weights={}), FleetError, {}),
    "LearnerLink": (partial(cormorant.LearnerLink, CLIENT, {}), FleetError, {"publish_every": (0,)}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "argument", "empty"),
    [(call, name, empty) for call, (*_, given) in CALLS.items() for name, many in given.items() for empty in many],
)
def test_an_empty_argument_is_refused_by_name(call: str, argument: str, empty: Any) -> None:
    function, error, _ = CALLS[call]
    with pytest.raises(error) as caught:
        function(**{argument: empty})
    said = str(caught.value)
    assert argument.split("_")[0] in said
    assert repr(empty) in said or '""' in said
    assert "\n" not in said


WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "open_fleet": {
        "device": ("tpu", 3), "storing_device": ("tpu",), "on_policy": ("yes", 1), "info": (5, [1], {"key": "k"}),
        "resume": ("nowhere",), "seed": (np.int64(3),),
    },
    "evaluate": {"episodes": ("10", 1.5, ["a"], None), "device": ("tpu",)},
    "read_dataset": {"uri": (5, b"data")},
    "FleetOptions": {
        "workers": ("2", True), "startup_timeout_s": ("30", -1, None, float("nan")), "overrides": (None, "abc"),
        "should_stop": (True,), "storing_device": (None, "tpu"),
    },
    "RayOptions": {
        "num_cpus": ("", "2", -1, True), "resources": ([], {"slot": "one"}),
        "runtime_env": (None,), "actors": ({},), "address": (b"auto",), "object_store_bytes": ("1G",),
    },
    "connect": {"token": (5, b"t"), "timeout_s": ("5", None, -1), "reconnect_s": ("x",), "ca_file": (5,)},
    "connect to a job": {"namespace": (5,), "timeout_s": ("5",)},
    "connect to nothing": {"head": (5,)},
    "batches": {"frames": (-1, "x"), "consumer": (5,), "prefetch": (-1, None), "max_staleness": ("x",)},
    "publish": {"version": ("2", 1.5, -1), "wait": ("x", None)},
    "LearnerLink": {"publish_every": ("2", -1)},
    "LearnerLink of a collector": {"client": ("pong",)},
    "pause": {"ttl": ("x", -1, 1e9), "wait": ("x", -1), "reason": (5,)},
    "rollback": {"version": ("x",)},
    "seed": {"seed": (1.5, "x", None, -1)},
    "streaming_split": {"n": (0, -1, "2", 1.5, None)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "argument", "wrong"),
    [(call, name, wrong) for call, given in WRONG.items() for name, many in given.items() for wrong in many],
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(call: str, argument: str, wrong: Any) -> None:
    function = CALLS[call][0]
    with pytest.raises((CormorantError, ClientError)) as caught:
        function(**{argument: wrong})
    said = str(caught.value)
    assert argument in said or str(wrong) in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "asked", [{}, {"num_steps": "5"}, {"num_steps": 5.0}, {"num_steps": 0}, {"num_steps": 1, "num_episodes": 1}]
)
def test_a_collector_takes_one_number(asked: Any) -> None:
    with (
        cormorant.make_collector(env="CartPole-v1", num_envs=1) as collector,
        pytest.raises(ValueError, match=r"num_steps .* and num_episodes .*: give exactly one of them, 1 or more"),
    ):
        collector.collect(**asked)


def test_a_policy_factory_that_returns_nothing_is_refused() -> None:
    with pytest.raises(PolicyLoadError, match=r"policy_factory .* returned None; return the policy"):
        cormorant.make_collector(env="CartPole-v1", num_envs=1, policy_factory=lambda *spaces: None)


def test_a_reader_refuses_wrong_types_and_takes_numbers_of_numpy(tmp_path: Path) -> None:
    job = {**MANIFEST, "spec": MANIFEST["spec"] | {"output": {"dataset": {"uri": str(tmp_path)}}}}
    job["spec"]["collection"] = {"framesPerBatch": 8, "totalFrames": 16}
    with cormorant.open_fleet(job, workers=1) as fleet:
        assert fleet.wait_until_done(60)
    dataset = cormorant.read_dataset(tmp_path)
    for wrong in ({"columns": 5}, {"columns": "action"}, {"columns": [5]}, {"batch_size": "8"}, {"seed": "x"}):
        with pytest.raises(DatasetError, match=str(*wrong.values()).strip("[]")):
            dataset.frames(shuffle=True, **wrong)
    with pytest.raises(DatasetError, match="rank is '0'; give Integral"):
        dataset.to_torch(rank="0", world_size="2")  # type: ignore[arg-type]  # as a script may
    whole = dataset.frames(shuffle=True, seed=np.int64(3), batch_size=np.int64(5))  # type: ignore[arg-type]
    assert [len(frames) for frames in whole] == [5, 5, 5, 1]


def test_numbers_and_collections_that_mean_something_are_taken() -> None:
    cormorant.RayOptions(num_cpus=0, num_gpus=0)
    cormorant.RayOptions(num_cpus=np.float64(0.5), runtime_env={"env_vars": {"A": "1"}}, actors=[{"num_cpus": 1}])
    cormorant.FleetOptions(hang_timeout_s=math.inf, seal_after_s=0, workers=2)
    assert cormorant.connect("http://127.0.0.1:9", reconnect_s=0).url == "http://127.0.0.1:9"
    with cormorant.make_collector(env="CartPole-v1", num_envs=1, seed=0, collection={}, info=()) as collector:
        assert collector.collect(num_steps=1).shape == (1, 1)
