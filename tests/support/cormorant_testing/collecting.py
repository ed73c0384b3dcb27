"""Builders of collectors and jobs of CountingEnvs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from cormorant_postproc import frames_of, normalized
from cormorant_testing.check import Checker
from cormorant_testing.envs import ACTION_SPACES, OBSERVATION_SPACES
from cormorant_testing.vectors import COUNTING, counting
from cormorant_worker.collect.collector import Collector, CollectorConfig
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.envs.single_envs import InlineVectorEnv
from cormorant_worker.policy.actor import Actor, PolicyActor, load_policy
from cormorant_worker.policy.exploration import ExplorationType
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.weights.staged import StagedWeights
from manifest_making import collector_job

SEEDS = WorkerPlace(seed=7, index=0)


def env_groups_of(
    num_envs: int, env_groups: int, options: Mapping[str, Any], seeds: WorkerPlace = SEEDS
) -> list[VectorEnv]:
    parts = np.array_split(np.array(seeds.env_seeds(num_envs)), env_groups)
    return [InlineVectorEnv(counting(**options), seeds=part.tolist()) for part in parts]


def make_collector(
    *,
    num_envs: int = 3,
    env_groups: int = 1,
    policy: str = "",
    policy_kwargs: Mapping[str, Any] | None = None,
    envs: Sequence[VectorEnv] = (),
    seeds: WorkerPlace = SEEDS,
    max_frames: int = 0,
    resets: bool = False,
    warmup: int = 0,
    exploration: str = "random",
    **options: Any,
) -> Collector:
    """A collector of CountingEnvs in this process; random unless `policy` names a factory."""
    observation = OBSERVATION_SPACES[options.get("observation", "box")]
    action = ACTION_SPACES[options.get("action", "discrete")]
    random = RandomActor(action, seeds.seed_of("actions"))
    actor: Actor = random
    weights = StagedWeights({})
    if policy:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.seed)
            models = load_policy(_entrypoint(policy), dict(policy_kwargs or {}), observation, action)
            actor = PolicyActor(models, observation, action, device=torch.device("cpu"))
        weights = StagedWeights(models.modules)
    config = CollectorConfig(
        seeds=seeds,
        max_frames_per_trajectory=max_frames,
        reset_at_each_batch=resets,
        init_random_frames=warmup,
        exploration_type=ExplorationType(exploration),
    )
    made = list(envs) or env_groups_of(num_envs, env_groups, options, seeds)
    return Collector(made, actor, config=config, warmup=random, weights=weights)


def make_checker(num_envs: int = 3, *, action: str = "discrete", **more: Any) -> Checker:
    fields = {name: more.pop(name) for name in list(more) if name in Checker.__dataclass_fields__}
    return Checker(job_seed=SEEDS.seed, num_envs=num_envs, action=action, options=more, **fields)


def make_job(
    *,
    num_envs: int = 2,
    policy: str = "",
    policy_kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
    queue: Mapping[str, Any] | None = None,
    dataset: str = "",
    run_policy: Mapping[str, Any] | None = None,
    collection: Mapping[str, Any] | None = None,
    workers: int = 1,
    info: Sequence[Mapping[str, Any]] = (),
    variants: Sequence[Mapping[str, Any]] = (),
    worker_groups: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> Any:
    """A CollectorJob of CountingEnvs (or of `env`)."""
    from cormorant_worker.launch import load_job

    options = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    block = env or {
        "gymnasium": {"entrypoint": COUNTING, "vectorization": "inline", "numEnvs": num_envs, "kwargs": options}
    }
    output: dict[str, Any] = {}
    if queue is not None or not dataset:
        output["queue"] = dict(queue or {"capacityBatches": 4})
    if dataset:
        output["dataset"] = {"uri": dataset}
    shown = {name: list(items) for name, items in (("info", info), ("variants", variants)) if items}
    spec: dict[str, Any] = {
        "env": {**block, **shown},
        "policy": {"entrypoint": _entrypoint(policy), "kwargs": dict(policy_kwargs or {})}
        if policy
        else {"random": {}},
        "collection": {"framesPerBatch": 20, "seed": 7, **(collection or {})},
        "output": output,
        "runPolicy": dict(run_policy or {}),
        "replicas": workers,
    }
    if worker_groups:
        spec["workerGroups"] = list(worker_groups)
    return load_job(collector_job("counting", spec))


def assert_same(found: Iterable[TensorDict], wanted: Iterable[TensorDict], *, but: Collection[Any] = ()) -> None:
    """Every value of every batch, but for some keys."""
    for ours, theirs in zip(found, wanted, strict=True):
        keys = set(theirs.keys(True, True))
        assert (set(ours.keys(True, True)), ours.shape, ours.names) == (keys, theirs.shape, theirs.names)
        for key in keys - {*but}:
            np.testing.assert_array_equal(ours[key].numpy(), theirs[key].numpy(), str(key), strict=True)


def seen_of(batch: Any, statistics: Any) -> Any:
    """The observations of a batch's frames; its policy, `seer`, saw what a learner computes from them bit for bit."""
    frames = frames_of(batch)
    assert torch.equal(frames_of(normalized(batch, statistics))["observation"], frames["seen"])
    return frames["observation"].double().numpy()


class ExpectedMoments:
    """numpy's opinion of the frames that were taken, for rewards with a gamma of 0.9."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.returns: list[float] = []
        self._running: dict[int, float] = {}

    def take(self, batch: Any) -> None:
        mask = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        for column, row in mask.nonzero().tolist():
            self.seen.append(batch["observation"][column, row].double().numpy())
            name = int(batch["collector", "traj_ids"][column, row])
            reward = float(batch["next", "reward"][column, row])
            self._running[name] = self._running.get(name, 0.0) * 0.9 + reward
            self.returns.append(self._running[name])

    def check(self, statistics: Any) -> None:
        for name, values in (("observation", self.seen), ("next/reward", self.returns)):
            found, whole = statistics.moments[name], np.array(values)
            scale = np.abs(whole).max()
            assert found.count == len(whole)
            assert np.abs(found.mean - whole.mean(axis=0)).max() <= 1e-9 * scale
            assert np.abs(found.m2 / found.count - whole.var(axis=0)).max() <= 1e-9 * scale**2


def scene(policy: str, *, gaps: bool = False, lengths: Any = (3, 8), **job: Any) -> tuple[Any, Checker]:
    """A job of two environments a worker, and what checks every value of its frames. `policy`: "versioned", whose
    actions name the version of their weights; "counter", which is recurrent; or "": random.
    """
    kinds: dict[str, dict[str, Any]] = {"versioned": {"acts_by_version": True}, "counter": {}, "": {"versions": False}}
    env = {"lengths": lengths, "action": "box" if policy == "versioned" else "discrete"}
    env |= {"ends": job.pop("ends")} if "ends" in job else {}
    return make_job(policy=policy, **env, **job), make_checker(2, gaps=gaps, **kinds[policy], **env)


def _entrypoint(policy: str) -> str:
    return policy if ":" in policy else f"cormorant_testing.policies:{policy}"
