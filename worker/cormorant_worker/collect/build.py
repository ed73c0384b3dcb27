"""From a CollectorJob to a Collector: the one place where classes of environments and actors are chosen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import gymnasium
import numpy as np
import structlog
import torch

from cormorant_contract.collection import Normalize
from cormorant_contract.env import EnvPoolEnv as EnvPoolBlock
from cormorant_contract.env import GymnasiumEnv as GymnasiumBlock
from cormorant_contract.job import CollectorJob
from cormorant_contract.sentences import did_you_mean
from cormorant_worker.collect.collector import Collector, CollectorConfig
from cormorant_worker.collect.env_sources import (
    Assignment,
    assign,
    check_tasks,
    env_factory,
    envpool_tasks,
    info_fields,
    vector_source,
    vectorize,
)
from cormorant_worker.collect.moments import BatchMoments
from cormorant_worker.collect.overrides import NO_OVERRIDES, WorkerOverrides
from cormorant_worker.collect.place import WorkerPlace, find_device
from cormorant_worker.envs.calibration import calibrate
from cormorant_worker.envs.cpus import OneCpu, available_cpus, native_threads
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.gymnasium_env import EnvSource, MadeEnvs, VariantEnvs, check_same, naming, words_of
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.envs.restarts import RestartLimits
from cormorant_worker.envs.vector import GymVectorEnv
from cormorant_worker.errors import ManifestError
from cormorant_worker.inference.address import AssignedServers
from cormorant_worker.inference.handshake import Greeting
from cormorant_worker.inference.remote_actor import RemoteActor
from cormorant_worker.inference.server import ServedPolicy
from cormorant_worker.normalize.moments import Statistics
from cormorant_worker.policy.actor import Actor, PolicyActor
from cormorant_worker.policy.compiled import compile_actor, in_dtype
from cormorant_worker.policy.exploration import ExplorationType
from cormorant_worker.policy.loading import PolicyModels, load_policy, wrap_policy
from cormorant_worker.policy.normalizer import Normalizer
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Space
from cormorant_worker.weights.blob import read_file, read_statistics
from cormorant_worker.weights.staged import StagedWeights

log = structlog.get_logger()

_PIXEL_RANK = 3
_MIN_ENVS_OF_TWO_GROUPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltCollector:
    """A collector and what was found out while it was built."""

    collector: Collector
    num_threads: int
    """EnvPool threads of each EnvGroup; 0 without EnvPool."""
    policy_call: str = ""
    """See `ServedPolicy.call`."""


def build_collector(
    job: CollectorJob,
    place: WorkerPlace,
    overrides: WorkerOverrides = NO_OVERRIDES,
    *,
    servers: AssignedServers | None = None,
) -> BuiltCollector:
    """Build environments and policy as the manifest says, and start the first episodes. `servers`: the inference
    servers, where the fleet may assign others than the place's while this waits for them.

    Raises:
        ManifestError: settings that cannot work together, or a device that is not there.
        EnvError, PolicyError, WeightsError: what the parts say.
    """
    device = find_device(overrides.device or place.device)
    spec = job.spec
    envs, num_threads, assignment, pool_threads = build_envs(job, place, overrides)
    try:
        observation, action = envs[0].observation_space, envs[0].action_space
        warmup = RandomActor(action, place.seed_of("actions"), observation=observation)
        actor: Actor = warmup
        weights = StagedWeights({})
        normalizer = make_normalizer(job, observation)
        num_rows = envs[0].num_envs if envs[0].lockstep else envs[0].min_in_flight
        policy_call = ""
        if place.servers:
            greeting = Greeting(
                name=place.attempt_name,
                observation_space=observation,
                action_space=action,
                rows=max(env.num_envs for env in envs),
                num_slots=len(envs),
            )
            remote = RemoteActor(servers or AssignedServers(place.servers), greeting)
            actor, weights = remote, remote.weights
        elif (
            served := build_policy(job, overrides, observation, action, normalizer, device=device, num_rows=num_rows)
        ) is not None:
            actor, weights, policy_call = served.actor, served.weights, served.call
        _refuse_unwritten(spec.collection.bfloat16 or (), actor)
        warmup_frames = place.warmup_frames if place.warmup_frames >= 0 else spec.collection.init_random_frames
        config = CollectorConfig(
            seeds=place,
            variants=assignment,
            max_frames_per_trajectory=0 if not envs[0].lockstep else spec.collection.max_frames_per_trajectory,
            reset_at_each_batch=spec.collection.reset_at_each_batch,
            init_random_frames=warmup_frames if actor is not warmup else 0,
            exploration_type=ExplorationType(spec.policy.exploration_type),
            episode_metrics=spec.collection.episode_metrics or (),
            post_processing=spec.collection.post_processing,
        )
        config = replace(config, **overrides.settings)
        collector = Collector(envs, actor, config=config, warmup=warmup, weights=weights)
        if normalizer is not None:
            collector.moments = BatchMoments(normalizer, collector.num_envs)
        if _fits_one_cpu(place, overrides):  # asked again: the policy may have given torch more threads
            collector.cpu = OneCpu(pool_threads)
    except BaseException:
        for env in envs:
            env.close()
        raise
    return BuiltCollector(collector=collector, num_threads=num_threads, policy_call=policy_call)


def _refuse_unwritten(keys: Sequence[str], actor: Actor) -> None:
    written = [".".join(leaf.key) for leaf in (*actor.outputs, *actor.states)]
    for key in keys:
        if key not in written:
            what = f"; it writes {', '.join(written)}" if written else "; it writes nothing but actions"
            raise ManifestError(
                f'spec.collection.bfloat16: the policy writes no "{key}"' + did_you_mean(key, written, otherwise=what)
            )


def make_normalizer(job: CollectorJob, observation: Space) -> Normalizer | None:
    """What normalizes observations, with what came with the initial weights; None: nothing does."""
    normalize, uri = job.spec.collection.normalize, job.spec.policy.initial_weights
    if normalize is None:
        return None
    normalizer = Normalizer(normalize, observation)
    if uri and (found := statistics_for(normalize, uri)) is not None:
        normalizer.use(found)
    return normalizer


def statistics_for(normalize: Normalize | None, uri: str) -> Statistics | None:
    """What the weights in a file act with, where the manifest normalizes; None: nothing, or the file does not say.

    Raises:
        WeightsError: it cannot be read.
    """
    if normalize is None:
        return None
    found = read_statistics(uri)
    if found is None and normalize.observation is not None:
        log.warning(
            "weights_without_statistics",
            weights=uri,
            reason="the policy acts on observations that are clipped and not normalized; if it was trained with "
            "normalized ones, save its statistics as metadata of the file",
        )
    return found


def build_policy(
    job: CollectorJob,
    overrides: WorkerOverrides,
    observation: Space,
    action: Space,
    normalizer: Normalizer | None,
    *,
    device: torch.device,
    num_rows: int,
    is_server: bool = False,
) -> ServedPolicy | None:
    """Build what acts, and its weights as the manifest says; None: actions are random."""
    policy, seen = job.spec.policy, observation if normalizer is None else normalizer.space
    # Built under the job's own seed: the policy's first weights are the same in every worker.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.spec.collection.seed)
        models: PolicyModels | None = None
        if overrides.policy is not None or overrides.policy_factory is not None:
            if (made := overrides.make_policy(seen, action)) is not None:
                models = wrap_policy(made, "the script")
        elif policy.entrypoint is not None:
            models = load_policy(policy.entrypoint, policy.kwargs, seen, action)
        if models is None:
            return None
        models = in_dtype(models, policy.dtype, device)
        acting = PolicyActor(models, seen, action, device=device, num_rows=num_rows)
        call, mode = "", policy.compile
        if is_server and mode == "on":
            mode = "auto"  # torch.compile is for one number of rows
        if mode != "off" and not overrides.shares_policy:
            exploration = ExplorationType(policy.exploration_type)
            call = compile_actor(acting, seen, mode=mode, num_rows=num_rows, exploration=exploration)
    acting.normalizer = normalizer
    weights = StagedWeights(models.modules, normalizer)
    if uri := policy.initial_weights:
        statistics = None if normalizer is None else normalizer.statistics
        weights.load(read_file(uri, allow_nonfinite=policy.allow_nonfinite), statistics)
    return ServedPolicy(actor=acting, weights=weights, observation_space=observation, action_space=action, call=call)


def rebuild(collector: Collector, job: CollectorJob, place: WorkerPlace, overrides: WorkerOverrides) -> None:
    """Give a collector new environments and streams, between two batches. Its policy and its weights stay.

    The old environments are closed first: they may hold what only one process can have.

    Raises:
        ManifestError, EnvError: as `build_collector`; the collector has no environments any more.
    """
    collector.close()
    built = build_envs(job, place, overrides)
    try:
        collector.begin_anew(built.groups, seeds=place)
        collector.cpu = OneCpu(built.pool_threads if _fits_one_cpu(place, overrides) else frozenset())
    except BaseException:
        for env in built.groups:
            env.close()
        raise


class BuiltEnvs(NamedTuple):
    groups: Sequence[VectorEnv]
    """One for each EnvGroup."""
    num_threads: int
    """EnvPool threads of each EnvGroup; 0 without EnvPool."""
    assignment: Assignment | None
    """Which environment plays which variant; None: the manifest has no variants."""
    pool_threads: frozenset[int] = frozenset()
    """Native ids of EnvPool's threads, where one of them steps all environments."""


def _fits_one_cpu(place: WorkerPlace, overrides: WorkerOverrides) -> bool:
    # Threads that torch starts for a batch would inherit the CPU.
    return torch.get_num_threads() == 1 and find_device(overrides.device or place.device).type == "cpu"


def build_envs(job: CollectorJob, place: WorkerPlace, overrides: WorkerOverrides) -> BuiltEnvs:
    env = job.spec.env
    if overrides.envs and env.gymnasium is not None:
        if env.variants:
            raise ManifestError(
                "spec.env.variants cannot be combined with environments of a script; remove one of them"
            )
        return BuiltEnvs((_build_made(overrides, env.gymnasium, place, info_fields(env)),), 0, None)
    seeds = place.env_seeds(env.num_envs)
    assignment = assign(env, place)
    if env.vector is not None:
        vector = GymVectorEnv(vector_source(env, overrides), seeds=seeds, info=info_fields(env))
        _refuse_restarts(job, vector)
        return BuiltEnvs((vector,), 0, None)
    if env.envpool is not None:
        one_cpu = _fits_one_cpu(place, overrides)
        before = native_threads()
        pools, num_threads = _build_pools(job, env.envpool, place, seeds, assignment, one_cpu=one_cpu)
        has_one_thread = num_threads == len(pools) == 1 and pools[0].lockstep
        return BuiltEnvs(pools, num_threads, assignment, native_threads() - before if has_one_thread else frozenset())
    assert env.gymnasium is not None  # the contract has one of both
    limits = RestartLimits(total=env.gymnasium.max_restarts, inherited=place.env_restarts)
    groups: list[VectorEnv] = []
    for columns in np.array_split(np.arange(len(seeds)), _num_served_groups(place, len(seeds))):
        source: EnvSource
        if assignment is None:
            source = env_factory(env)
        else:
            factories = tuple(env_factory(env.of_variant(variant)) for variant in assignment.variants)
            source = VariantEnvs(factories, assignment.names, assignment.task_ids[columns].tolist())
        own = [seeds[column] for column in columns]
        groups.append(vectorize(source, env.gymnasium, seeds=own, limits=limits, info=info_fields(env)))
    return BuiltEnvs(groups, 0, assignment)


def _refuse_restarts(job: CollectorJob, env: GymVectorEnv) -> None:
    """What begins episodes on request needs rows that can be reset alone."""
    collection = job.spec.collection
    asked = "resetAtEachBatch" if collection.reset_at_each_batch else ""
    asked = "maxFramesPerTrajectory" if collection.max_frames_per_trajectory else asked
    if asked and not env.lockstep:
        env.close()
        raise ManifestError(
            f"spec.collection.{asked} needs rows of {job.spec.env.name} to be reset alone, and "
            f'reset(options={{"reset_mask": ...}}) does not do that there; remove {asked}, or implement reset_mask'
        )


def _build_pools(
    job: CollectorJob,
    block: EnvPoolBlock,
    place: WorkerPlace,
    seeds: list[int],
    assignment: Assignment | None,
    *,
    one_cpu: bool,
) -> tuple[Sequence[VectorEnv], int]:
    """One pool for each EnvGroup, or for each variant that this worker plays, and how many threads each group has.
    Those of variants share the threads of one pool by size.
    """
    tasks = envpool_tasks(job.spec.env)
    check_tasks(tasks)
    max_threads = place.max_threads or available_cpus()
    is_async = 0 < block.batch_size < block.num_envs
    env_groups = 1
    if assignment is not None:
        check_same("the variants of spec.env", [(name, words_of(*task.spaces())) for name, task in tasks.items()])
        by_variant: dict[str, list[int]] = {}
        for task_id, seed in zip(assignment.task_ids.tolist(), seeds, strict=True):
            by_variant.setdefault(assignment.names[task_id], []).append(seed)
        shares = list(by_variant.items())
    else:
        if is_async:
            tasks[""] = _limit_async(tasks[""], job.spec.collection.max_frames_per_trajectory)
        elif place.servers:
            env_groups = _num_served_groups(place, block.num_envs)
        else:
            env_groups = _num_env_groups(tasks[""].spaces()[0], block.num_envs, max_threads)
        shares = [("", part.tolist()) for part in np.array_split(np.asarray(seeds), env_groups)]
    threads = block.num_threads or place.num_threads
    if not threads:
        task = tasks[max(shares, key=lambda share: len(share[1]))[0]]
        one_cpu = one_cpu and len(shares) == 1 and not is_async
        found = calibrate(task, num_envs=block.num_envs, max_threads=max_threads, one_cpu=one_cpu)
        # With two groups, the policy needs a CPU while one of them steps.
        threads = max(1, found.num_threads - (env_groups - 1))
        if found.step_seconds:
            log.info(
                "threads_calibrated",
                task_id=task.task_id,
                num_envs=block.num_envs,
                num_threads=threads,
                env_groups=env_groups,
                step_seconds={threads: round(seconds, 6) for threads, seconds in found.step_seconds.items()},
            )
    info = info_fields(job.spec.env)
    pools: list[VectorEnv] = []
    try:
        for name, own in shares:
            with naming(name):
                share = threads if assignment is None else max(1, round(threads * len(own) / len(seeds)))
                batch_size = block.batch_size if is_async else 0
                pools.append(tasks[name].open(num_threads=share, seeds=own, batch_size=batch_size, info=info))
    except BaseException:
        for pool in pools:
            pool.close()
        raise
    return pools, threads


def _limit_async(task: EnvPoolTask, max_frames: int) -> EnvPoolTask:
    """An asynchronous pool cuts trajectories by its own time limit, which is the same unless lives end episodes."""
    if not max_frames:
        return task
    if task.loses_lives:
        raise ManifestError(
            "spec.collection.maxFramesPerTrajectory with episodic_life needs batchSize = numEnvs; set batchSize: 0"
        )
    return replace(task, max_episode_steps=min(task.max_episode_steps or max_frames, max_frames))


def _num_env_groups(observation: Space, num_envs: int, max_threads: int) -> int:
    """Two groups where the policy is expensive (pixels): one steps while the policy acts for the other.

    Decided by the manifest and the worker's CPU limit and not by timing, so that a fixed seed reproduces a run. With
    one CPU nothing can step in the meantime.
    """
    is_image = len(observation.shape or ()) == _PIXEL_RANK and observation.dtype == np.uint8
    return 2 if is_image and num_envs >= _MIN_ENVS_OF_TWO_GROUPS and max_threads > 1 else 1


def _num_served_groups(place: WorkerPlace, num_envs: int) -> int:
    """Two where inference servers act: the rows of one are at the server while the other steps."""
    return 2 if place.servers and num_envs > 1 else 1


def _build_made(
    overrides: WorkerOverrides, block: GymnasiumBlock, place: WorkerPlace, info: tuple[InfoField, ...]
) -> VectorEnv:
    made = MadeEnvs(overrides.envs)
    if len(overrides.envs) == 1:
        # A worker is a process already: its only environment needs no other.
        only = made.make(0)
        if hasattr(type(only), "vector_env"):
            if info:
                raise ManifestError(
                    f"spec.env.info declares {info[0].key}, and environments that are stepped together have no info; "
                    "remove env.info"
                )
            vector: VectorEnv = only.vector_env(place.env_seeds(only.num_workers))
            return vector
        if isinstance(only, gymnasium.Env):
            made.keep(0, only)
        block = block.model_copy(update={"vectorization": "inline"})
    limits = RestartLimits(total=block.max_restarts, inherited=place.env_restarts, raises=overrides.raises)
    return vectorize(made, block, seeds=place.env_seeds(len(overrides.envs)), limits=limits, info=info)
