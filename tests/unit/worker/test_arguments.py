"""Arguments: an empty one is never taken for one that is not given, and one of a wrong type is refused where it is
given; what `open_fleet(env=...)` and `make_collector(env=...)` refuse before anything starts.
"""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import cormorant
from cormorant import make_collector, open_fleet
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
from cormorant_worker.entrypoints import load_object
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.local_fleet import CurrentLoan, LocalBatches
from cormorant_worker.policy.actor import load_policy
from cormorant_worker.scripted import Scripted
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


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: cormorant.evaluate(env="CartPole-v1", episodes=1, collection={"mode": "sync"}),
            "collection has mode, which an evaluation does not read",
        ),
        (lambda: cormorant.connect("http://h:1", token="t", token_file="f"), "token and token_file both give a token"),
        (lambda: cormorant.connect("http://h:1", ca_file="f"), "ca_file, .*https, .* address is http://h:1"),
        (lambda: CLIENT.batches(prefetch=0).next("x"), "timeout is 'x'; give "),  # type: ignore[arg-type]
        (lambda: asyncio.run(cormorant.aio.AsyncClient(CLIENT).next_batch("x")), "timeout is 'x'; "),
        (lambda: LocalBatches(None, CurrentLoan()).next("x"), "timeout is 'x'; give "),  # type: ignore[arg-type]
        (lambda: cormorant.RayOptions(address="auto", object_store_bytes=1 << 30), "object_store_bytes=107"),
    ],
)
def test_arguments_without_an_effect_are_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(CormorantError, match=sentence):
        call()


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


def make_cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


POOL = {"envpool": {"taskId": "CartPole-v1"}}
GYM = {"gymnasium": {"id": "CartPole-v1"}}


def needs_two(first: int, second: int) -> gymnasium.Env:
    raise AssertionError("never called")


STEPS = "environments step themselves; leave it out"


def test_job_says_what_a_manifest_would() -> None:
    job = Scripted(
        env=make_cartpole, num_envs=4, workers=3, total_frames=1024, collection={"weights": {"maxStaleness": 1}}
    ).job()
    collection = job.spec.collection
    assert (job.spec.env.num_envs, job.spec.replicas) == (4, 3)
    assert (collection.frames_per_batch, collection.total_frames, collection.weights.max_staleness) == (256, 1024, 1)
    collection = Scripted(env=make_cartpole, on_policy=True).job().spec.collection
    assert (collection.mode, collection.weights.max_staleness) == ("sync", 0)
    collection = Scripted(env=make_cartpole).job().spec.collection
    assert (collection.mode, collection.weights.max_staleness) == ("async", None)


@pytest.mark.parametrize(
    "policy", [{"entrypoint": "cormorant.policies:mlp", "kwargs": {"hidden": [8]}, "dtype": "bfloat16"}, {"random": {}}]
)
def test_policy_may_be_the_block_of_a_manifest(policy: dict) -> None:
    scripted = Scripted(env=make_cartpole, policy=policy)
    assert policy.items() <= scripted.job().spec.policy.to_document().items()
    assert scripted.overrides().policy is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, r'pass a manifest, for example open_fleet\("job.yaml"\), or env='),
        ({"manifest": "job.yaml", "env": "CartPole-v1"}, "manifest and env exclude each other"),
        ({"manifest": {}, "num_envs": 4, "seed": 3}, "num_envs, seed cannot be combined with a manifest"),
        ({"manifest": make_cartpole}, "a function is not a manifest; pass environments as env="),
        ({"env": make_cartpole(), "policy": None}, "env is a TimeLimit; pass a class or a function"),
        ({"env": needs_two}, r"env needs arguments \(first, second\).*env=lambda: needs_two\(first=...\)"),
        ({"env": make_cartpole, "policy": dict}, "policy is the class dict; pass an instance"),
        ({"env": make_cartpole, "on_policy": True, "mode": "async"}, "on_policy collects rounds of all workers"),
        (
            {"env": make_cartpole, "on_policy": True, "collection": {"weights": {"maxStaleness": 1}}},
            "on_policy sets collection.weights, and collection has weights, too",
        ),
        ({"env": make_cartpole, "policy": 3}, r"policy is 3; give Callable\[\.\.\., Any\] \| str"),
        ({"env": make_cartpole, "policy": len, "policy_factory": len}, "policy and policy_factory exclude each other"),
        ({"env": make_cartpole, "num_envs": 0}, "numEnvs"),
        (
            {"env": POOL, "num_envs": 8},
            r"num_envs=8 .* env\[\"envpool\"\], which says it as numEnvs; leave num_envs out",
        ),
        (
            {"env": GYM | {"info": [{"key": "x"}]}, "info": ["y"]},
            r"info=\['y'\] .*env, which says it as info; leave info out",
        ),
        (
            {"env": "CartPole-v1", "seed": 0, "collection": {"seed": 3}},
            "seed=0 .* collection, which says it as seed; leave seed out",
        ),
        ({"env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": "4"}}}, "numEnvs"),
        ({"env": "CartPole-v1", "name": "mine"}, 'name "mine" chooses a job of a manifest.*env was given'),
        ({"manifest": MANIFEST, "name": "mine"}, 'the manifest holds no CollectorJob named "mine"; it has pole'),
        ({"env": make_cartpole, "collection": {"framesPerBatsch": 3}}, "framesPerBatsch"),
        ({"env": gymnasium.make_vec("CartPole-v1", num_envs=2)}, "env is a CartPoleVectorEnv; .*num_envs that makes"),
        ({"env": "envpool:CartPole-v1", "vectorization_mode": "inline"}, f"envpool {STEPS}"),
        ({"env": {"vector": {"id": "CartPole-v1"}}, "vectorization_mode": "inline"}, f"vector {STEPS}"),
        ({"env": "envpool:"}, "is empty"),
    ],
)
def test_refusals_are_sentences(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ManifestError, match=sentence):
        open_fleet(**given)  # type: ignore[arg-type]  # that is what is refused


def test_batches_without_a_size_have_64_steps_of_a_mappings_envs() -> None:
    job = Scripted(env={"envpool": {"taskId": "CartPole-v1", "numEnvs": 3}}).job()
    assert (job.spec.env.num_envs, job.spec.collection.frames_per_batch) == (3, 192)
    assert Scripted(env="CartPole-v1").job().spec.collection.frames_per_batch == 512


def test_collector_plays_a_class_with_a_factory_of_its_spaces() -> None:
    seen = []

    def factory(observation: gymnasium.Space, action: gymnasium.Space) -> object:
        seen.append((observation.shape, action.n))  # type: ignore[attr-defined]  # a Discrete
        return lambda observation: observation[:, 0].long() * 0 + 1

    with make_collector(env=make_cartpole, policy_factory=factory, num_envs=2) as collector:
        batch = collector.collect(num_steps=20)
    assert seen == [((4,), 2)]
    assert batch["action"].unique().tolist() == [1]
    assert batch.shape == (2, 10)


def test_main_in_an_entrypoint_gets_a_remedy() -> None:
    with pytest.raises(EnvBuildError, match=r"names the script itself.*open_fleet\(env=MyEnv\)"):
        load_object("__main__:MyEnv", what="environment")
    space = gymnasium.spaces.Discrete(2)
    with pytest.raises(PolicyLoadError, match=r"names the script itself.*policy_factory"):
        load_policy("__main__:make", {}, space, space)
