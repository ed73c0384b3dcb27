"""Builds a Collector from a CollectorJob: the only place where classes of environments and actors are chosen."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import structlog
import torch

from cormorant_contract.collection import Normalize
from cormorant_contract.env import Recycle
from cormorant_contract.job import CollectorJob
from cormorant_contract.spec import CollectorJobSpec
from cormorant_worker.collect.agents_actor import AgentsActor
from cormorant_worker.collect.collector import Collector, CollectorConfig
from cormorant_worker.collect.overrides import NO_OVERRIDES, WorkerOverrides
from cormorant_worker.collect.place import WorkerPlace, egl_device, find_device
from cormorant_worker.collect.trajectories import BatchMoments
from cormorant_worker.envs.cpus import OneCpu
from cormorant_worker.envs.kinds import kind_of
from cormorant_worker.envs.request import Assignment, EnvRequest, OpenedEnvs, assign
from cormorant_worker.envs.restarts import RestartLimits
from cormorant_worker.errors import ManifestError, PolicyMismatch
from cormorant_worker.inference.address import AssignedServers
from cormorant_worker.inference.connections import Greeting
from cormorant_worker.inference.remote_actor import RemoteActor
from cormorant_worker.inference.server import ServedPolicy
from cormorant_worker.normalize import Statistics
from cormorant_worker.policy.actor import Actor, PolicyActor, PolicyModels, load_policy, wrap_policy
from cormorant_worker.policy.compiled import compile_actor, in_dtype
from cormorant_worker.policy.exploration import ExplorationType
from cormorant_worker.policy.normalizer import Normalizer
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Space, leaves
from cormorant_worker.weights.blob import read_file, read_statistics
from cormorant_worker.weights.staged import StagedWeights

log = structlog.get_logger()


def build_collector(
    job: CollectorJob,
    place: WorkerPlace,
    overrides: WorkerOverrides = NO_OVERRIDES,
    *,
    servers: AssignedServers | None = None,
) -> Collector:
    """Build environments and policy according to the manifest, and start the first episodes. `servers`: the inference
    servers; the fleet may assign others while this waits for them. Raises ManifestError where settings cannot work
    together or a device is not there, and EnvError, PolicyError or WeightsError where a part cannot be built.
    """
    device = find_device(overrides.device or place.device)
    if device.index is not None:  # MuJoCo renders where the worker's policy is, not everywhere on the first device
        egl = egl_device(device.index, visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", egl)
    spec = job.spec
    (envs, num_threads, pool_threads), assignment = build_envs(job, place, overrides)
    try:
        observation, action = envs[0].observation_space, envs[0].action_space
        warmup = RandomActor(action, place.seed_of("actions"), observation=observation)
        actor: Actor = warmup
        weights = StagedWeights({})
        normalizer = make_normalizer(job, observation)
        num_rows = envs[0].num_envs if envs[0].lockstep else envs[0].min_in_flight
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
        elif spec.policy.agents is not None:
            with _jobs_seed(job):
                actor = AgentsActor(spec.policy, observation, action, warmup, device=device, num_rows=num_rows)
            weights = actor.weights
        elif (
            served := build_policy(job, overrides, observation, action, normalizer, device=device, num_rows=num_rows)
        ) is not None:
            actor, weights = served.actor, served.weights
        _refuse_taken(actor, observation, action)
        _refuse_unwritten(spec.collection.bfloat16 or (), actor)
        warmup_frames = place.warmup_frames if place.warmup_frames >= 0 else spec.collection.init_random_frames
        config = CollectorConfig(
            seeds=place,
            variants=assignment,
            has_team_reward=bool(getattr(spec.env.block, "team_reward", None)),
            max_frames_per_trajectory=0 if not envs[0].lockstep else spec.collection.max_frames_per_trajectory,
            reset_at_each_batch=spec.collection.reset_at_each_batch,
            init_random_frames=warmup_frames if actor is not warmup else 0,
            exploration_type=ExplorationType(spec.policy.exploration_type),
            episode_metrics=spec.collection.episode_metrics or (),
            post_processing=spec.collection.post_processing,
        )
        config = replace(config, **overrides.settings)
        collector = Collector(envs, actor, config=config, warmup=warmup, weights=weights)
        collector.num_threads = num_threads
        if isinstance(actor, AgentsActor):
            actor.playing = lambda: [versions for group in collector.env_groups for versions in group.hidden]
        if collector.layout(1).hides_reward:
            _refuse_reward(spec)
        if normalizer is not None:
            collector.moments = BatchMoments(normalizer, collector.num_envs)
        if _fits_one_cpu(place, overrides):  # asked again: the policy may have given torch more threads
            collector.cpu = OneCpu(pool_threads)
    except BaseException:
        for env in envs:
            env.close()
        raise
    return collector


def _refuse_taken(actor: Actor, observation: Space, action: Space) -> None:
    taken = {leaf.key for leaf in (*leaves(observation, ("observation",)), *leaves(action, ("action",)))}
    for leaf in actor.outputs:
        # Groups' versions are the actor's own.
        if leaf.key in taken or (leaf.key[0] == "collector" and not isinstance(actor, AgentsActor)):
            raise PolicyMismatch(
                f"the policy writes {'.'.join(leaf.key)}, which is another key of batches; name its output otherwise"
            )


def _refuse_unwritten(keys: Sequence[str], actor: Actor) -> None:
    written = [".".join(leaf.key) for leaf in (*actor.outputs, *actor.states)]
    for key in keys:
        if key not in written:
            names = ", ".join(written) or "only actions"
            raise ManifestError(f'spec.collection.bfloat16: the policy writes no "{key}"; it writes {names}')


def _refuse_reward(spec: CollectorJobSpec) -> None:
    normalize = spec.collection.normalize
    normalizes = normalize is not None and normalize.reward is not None
    if spec.collection.multi_step is not None or normalizes:
        raise ManifestError(
            f"spec.collection.{'normalize.reward' if normalizes else 'multiStep'} is about one reward, and every agent "
            "has its own; remove it, or set env.pettingzoo.teamReward"
        )


def make_normalizer(job: CollectorJob, observation: Space) -> Normalizer | None:
    """Build the normalizer of observations, with the statistics of the initial weights; None without `normalize`."""
    normalize, uri = job.spec.collection.normalize, job.spec.policy.initial_weights
    if normalize is None:
        return None
    normalizer = Normalizer(normalize, observation)
    if uri and (statistics := statistics_for(normalize, uri)) is not None:
        normalizer.use(statistics)
    return normalizer


def statistics_for(normalize: Normalize | None, uri: str) -> Statistics | None:
    """Statistics stored with a weights file, if the manifest normalizes; None: none stored. Raises WeightsError."""
    if normalize is None:
        return None
    statistics = read_statistics(uri)
    if statistics is None and normalize.observation is not None:
        log.warning(
            "weights_without_statistics",
            weights=uri,
            reason="the policy acts on observations that are clipped and not normalized; if it was trained with "
            "normalized ones, save its statistics as metadata of the file",
        )
    return statistics


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
    """Build the policy and load its weights according to the manifest; None: random actions."""
    policy, seen = job.spec.policy, observation if normalizer is None else normalizer.space
    with _jobs_seed(job):
        models: PolicyModels | None = None
        if overrides.policy is not None or overrides.policy_factory is not None:
            made = overrides.policy
            if overrides.policy_factory is not None:
                made = overrides.policy_factory(*(seen, action) if overrides.takes_spaces else ())
            if made is not None:
                models = wrap_policy(made, "the script")
        elif policy.entrypoint is not None:
            models = load_policy(policy.entrypoint, policy.kwargs, seen, action)
        if models is None:
            return None
        models = in_dtype(models, policy.dtype, device)
        acting = PolicyActor(models, seen, action, device=device, num_rows=num_rows)
        mode = policy.compile
        if is_server and mode == "on":
            mode = "auto"  # torch.compile is for one number of rows
        if mode != "off" and not overrides.shares_policy:
            exploration = ExplorationType(policy.exploration_type)
            compile_actor(acting, seen, mode=mode, num_rows=num_rows, exploration=exploration)
    acting.normalizer = normalizer
    weights = StagedWeights(models.modules, normalizer)
    if uri := policy.initial_weights:
        statistics = None if normalizer is None else normalizer.statistics
        weights.load(read_file(uri, allow_nonfinite=policy.allow_nonfinite), statistics, where=f" in {uri}")
    return ServedPolicy(actor=acting, weights=weights, observation_space=observation, action_space=action)


@contextmanager
def _jobs_seed(job: CollectorJob) -> Iterator[None]:
    """Policies are built under the job's own seed: their first weights are the same in every worker."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.spec.collection.seed)
        yield


def rebuild(collector: Collector, job: CollectorJob, place: WorkerPlace, overrides: WorkerOverrides) -> None:
    """Give a collector new environments and random streams, between two batches, keeping its policy and weights. The
    old environments are closed first, because they may hold exclusive resources. Raises as `build_collector`; the
    collector then has no environments.
    """
    collector.close()
    built, _ = build_envs(job, place, overrides)
    try:
        collector.begin_anew(built.groups, seeds=place)
        collector.cpu = OneCpu(built.pool_threads if _fits_one_cpu(place, overrides) else frozenset())
    except BaseException:
        for env in built.groups:
            env.close()
        raise


def _fits_one_cpu(place: WorkerPlace, overrides: WorkerOverrides) -> bool:
    # Threads that torch starts for a batch would inherit the CPU.
    return torch.get_num_threads() == 1 and find_device(overrides.device or place.device).type == "cpu"


def build_envs(
    job: CollectorJob, place: WorkerPlace, overrides: WorkerOverrides
) -> tuple[OpenedEnvs, Assignment | None]:
    """The environments, and which of them plays which variant; None: the manifest has no variants."""
    env, collection = job.spec.env, job.spec.collection
    if overrides.envs and env.variants:
        raise ManifestError("spec.env.variants cannot be combined with environments of a script; remove one of them")
    assignment = assign(env, group_number=place.group_number, index=place.index)
    begins = "resetAtEachBatch" if collection.reset_at_each_batch else ""
    recycle = env.recycle or Recycle()
    request = EnvRequest(
        env=env,
        seeds_of=place.env_seeds,
        makers=overrides.envs,
        assignment=assignment,
        limits=RestartLimits(
            total=getattr(env.block, "max_restarts", 0),
            inherited=place.env_restarts,
            raises=overrides.raises,
            recycle_rss_mib=recycle.rss_mi_b,
            recycle_episodes=recycle.episodes,
        ),
        is_served=bool(place.servers),
        max_threads=place.max_threads,
        num_threads=place.num_threads,
        one_cpu=_fits_one_cpu(place, overrides),
        max_frames=collection.max_frames_per_trajectory,
        begins="maxFramesPerTrajectory" if collection.max_frames_per_trajectory else begins,
    )
    return kind_of(env).open_envs(request), assignment
