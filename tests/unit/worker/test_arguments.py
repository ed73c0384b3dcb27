"""What `open_fleet(env=...)`, `make_collector(env=...)` and others refuse before anything starts."""

from typing import Any

import gymnasium
import pytest

import cormorant
from cormorant import open_fleet
from cormorant.errors import LastWorker, ManifestError, PolicyLoadError
from cormorant_worker.entrypoints import load_object
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.policy.actor import load_policy
from cormorant_worker.scripted import Scripted


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


def make_cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


POOL = {"envpool": {"taskId": "CartPole-v1"}}
GYM = {"gymnasium": {"id": "CartPole-v1"}}


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
    assert (collection.mode, collection.weights.max_staleness, collection.frames_per_batch) == ("async", None, 512)
    job = Scripted(env={"envpool": {"taskId": "CartPole-v1", "numEnvs": 3}}).job()
    assert (job.spec.env.num_envs, job.spec.collection.frames_per_batch) == (3, 192)


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
        ({"env": make_cartpole(), "policy": None}, "env is a TimeLimit; pass a class or function"),
        ({"env": make_cartpole, "on_policy": True, "mode": "async"}, "on_policy sets mode and collection.weights"),
        (
            {"env": make_cartpole, "on_policy": True, "collection": {"weights": {"maxStaleness": 1}}},
            "on_policy sets mode and collection.weights; leave them out",
        ),
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
        ({"env": make_cartpole, "collection": {"framesPerBatsch": 3}}, "framesPerBatsch"),
        ({"env": gymnasium.make_vec("CartPole-v1", num_envs=2)}, "env is a CartPoleVectorEnv; .*num_envs that makes"),
        ({"env": "envpool:CartPole-v1", "vectorization_mode": "inline"}, f"envpool {STEPS}"),
        ({"env": {"vector": {"id": "CartPole-v1"}}, "vectorization_mode": "inline"}, f"vector {STEPS}"),
        ({"env": "envpool:"}, "must have at least 1 character"),
        ({"env": "CartPole-v1", "engine": "ray"}, r"engine is 'ray'; give cormorant\.RayOptions"),
        ({"env": "CartPole-v1", "workers": 0}, "workers is 0; give a number from 1 on"),
    ],
)
def test_refusals_are_sentences(given: dict[str, object], sentence: str) -> None:
    with pytest.raises((ManifestError, LastWorker), match=sentence):
        open_fleet(**given)  # type: ignore[arg-type]  # that is what is refused


def test_main_in_an_entrypoint_gets_a_remedy() -> None:
    with pytest.raises(EnvBuildError, match=r"names the script itself.*open_fleet\(env=MyEnv\)"):
        load_object("__main__:MyEnv", what="environment")
    space = gymnasium.spaces.Discrete(2)
    with pytest.raises(PolicyLoadError, match=r"names the script itself.*policy_factory"):
        load_policy("__main__:make", {}, space, space)
