"""An empty argument is never taken for one that is not given."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import cormorant
from cormorant.errors import BadAddress, DatasetError, FleetError, ManifestError, WeightsError

MANIFEST = {
    "apiVersion": "cormorant.dev/v1alpha1",
    "kind": "CollectorJob",
    "metadata": {"name": "pole"},
    "spec": {
        "env": {"gymnasium": {"id": "CartPole-v1"}},
        "policy": {"random": {}},
        "collection": {"framesPerBatch": 8},
        "output": {"queue": {}},
    },
}
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
        cormorant.RayOptions, ManifestError, {"address": ("",), "scheduling": ("",), "object_store_bytes": (0,)}
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
    "patch": (partial(CLIENT.patch, {}), FleetError, {"base": ("",)}),
    "publish": (partial(CLIENT.publish, {}), WeightsError, {"model": ("",)}),
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


def test_numbers_and_collections_that_mean_something_are_taken() -> None:
    cormorant.RayOptions(num_cpus=0, num_gpus=0)
    assert cormorant.connect("http://127.0.0.1:9", reconnect_s=0).url == "http://127.0.0.1:9"
    with cormorant.make_collector(env="CartPole-v1", num_envs=1, seed=0, collection={}, info=()) as collector:
        assert collector.collect(num_steps=1).shape == (1, 1)
