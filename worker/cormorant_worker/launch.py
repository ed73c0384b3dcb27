"""The Python API: starts a fleet, or one collector in this process, from a manifest or Python objects.

    from cormorant import open_fleet

    with open_fleet("job.yaml", workers=2) as fleet:
        for batch in fleet.batches():                  # TensorDict [B, T]
            learn(batch)
            fleet.publish(policy)

    with open_fleet(env=MyEnv, policy=policy, num_envs=8, workers=2, on_policy=True) as fleet:  # without a manifest
        ...

A script that opens a fleet needs no `if __name__ == "__main__"`: worker processes never import it.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cormorant_contract import errors as contract
from cormorant_contract.fleet import read_state
from cormorant_contract.job import CollectorJob
from cormorant_contract.parsing import parse_job
from cormorant_manifest.entrypoints import missing_entrypoints
from cormorant_manifest.reader import STDIN, load_jobs
from cormorant_worker.collect.overrides import NO_OVERRIDES, WorkerOverrides
from cormorant_worker.errors import ManifestError
from cormorant_worker.fork_server import WORKERS, fork_server
from cormorant_worker.scripted import EnvChoice, Mode, PolicyChoice, Scripted, Vectorization

if TYPE_CHECKING:
    from cormorant_worker.collect.collector import Collector
    from cormorant_worker.fleet.options import FleetOptions, RayOptions
    from cormorant_worker.fleet.transport import Engine
    from cormorant_worker.local_fleet import LocalFleet

_ALSO_WITH_MANIFESTS = ("workers", "usual_vectorization")
"""Fields of `Scripted` that callers may have set beside a manifest; the others belong to `env`."""

Manifest = str | os.PathLike[str] | Mapping[str, Any] | CollectorJob
"""Path of a YAML file, the document as nested mappings, or a parsed job."""


def open_fleet(
    manifest: Manifest | None = None,
    *,
    env: EnvChoice | None = None,
    policy: PolicyChoice | None = None,
    policy_factory: Callable[..., Any] | None = None,
    num_envs: int | None = None,
    vectorization_mode: Vectorization | None = None,
    frames_per_batch: int | None = None,
    total_frames: int | None = None,
    init_random_frames: int | None = None,
    on_policy: bool = False,
    mode: Mode | None = None,
    seed: int | None = None,
    collection: Mapping[str, Any] | None = None,
    info: Sequence[str | Mapping[str, Any]] | None = None,
    workers: int | None = None,
    device: str | None = None,
    storing_device: str | None = None,
    engine: "RayOptions | None" = None,
    resume: str | os.PathLike[str] | None = None,
    options: "FleetOptions | None" = None,
) -> "LocalFleet":
    """Start the workers of a job and wait until each has its first observation.

        with open_fleet("examples/cartpole-ppo.yaml") as fleet:  # has maxStaleness: 0, as PPO needs it
            policy = mlp(*fleet.spaces)
            fleet.publish(policy)
            for batch in fleet.batches():
                update(policy, batch)
                fleet.publish(policy)  # the next batch is from these weights

    Scripts and notebooks need no manifest: environments and policies are cloudpickled to the workers.

        with open_fleet(env=lambda: gymnasium.make("CartPole-v1"), policy=network, on_policy=True) as fleet:
            batch = fleet.next_batch()

    Args:
        manifest: path of a YAML file, a mapping, or a CollectorJob. The file's folder is put on the import path, so
            that entrypoints find modules beside it. Of a file with several jobs, pass `load_job(path, name=...)`.
            Cannot be combined with `env` and the arguments down to `info`.
        env: a class or function without arguments that makes one gymnasium.Env, a gymnasium id, or a mapping like
            `spec.env` of a manifest, which has `numEnvs` and `vectorization` of its own.
        policy: a TensorDictModule, a torch module, a callable on observations, "package.module:factory", or a mapping
            like `spec.policy` of a manifest, which groups of agents need:
            `{"agents": {"red": {"entrypoint": ...}, "blue": {"model": "red"}}}`; None: random actions.
        policy_factory: `factory(observation_space, action_space)`, called in each worker, in place of `policy`.
        num_envs: environments per worker; None: 8.
        vectorization_mode: subprocess, the default: one process per environment (Gymnasium's async); inline: all in the
            worker process (Gymnasium's sync).
        frames_per_batch: frames per batch of each worker; None: 64 steps of its environments.
        total_frames: exact total over the fleet; None: until the fleet is closed.
        init_random_frames: frames with random actions before the policy acts, over the fleet; None: 0.
        on_policy: every batch is a round of all workers, collected with the newest weights published before the batch
            was requested: PPO, A2C and other algorithms without off-policy correction need it. False: workers
            collect while the learner learns, so that batches are one or more versions old.
        mode: async (the default without `on_policy`): one worker's batch at a time; sync: one batch of every worker,
            stacked.
        seed: base seed, from which each environment derives its own; None: 0.
        collection: further fields of `spec.collection` as a manifest spells them: `{"weights": {"maxStaleness": 2}}`.
            A field that is also given as an argument is refused.
        info: keys of the environments' info that are stored with every frame, or items as `spec.env.info` spells them.
        workers: worker processes; None: the manifest's number, at most one per CPU.
        device: torch device of the policies; None: "cuda" in gpu worker groups, "cpu" elsewhere.
        storing_device: torch device on which batches are handed out; None: "cpu".
        engine: where workers run; None: processes on this machine. RayOptions: actors on a Ray cluster, which may also
            run on this machine.
        resume: a file that `Fleet.save` wrote, of the same job with the same number of workers, to continue from.
        options: time limits and other settings; see FleetOptions. Arguments beside it count.

    Returns:
        The running fleet; close it, or use it as a context manager.

    Raises:
        ManifestError: the manifest is refused; with every problem found, one per line.
        FleetError: the Ray cluster cannot be reached or started.
        DeviceUnavailable: a gpu is asked for and torch finds none.
        UnknownEnv, EnvBuildError: EnvPool cannot build the task.
        WorkerFailed: a worker cannot start; names it and says why.
        DatasetError: the dataset's folder cannot be used, or belongs to another job.
        StateError: the file to resume from cannot be read, or is of another job.
    """
    job, overrides = describe_job(
        manifest, env, policy=policy, policy_factory=policy_factory, num_envs=num_envs,
        workers=1 if workers is None else workers, frames_per_batch=frames_per_batch, total_frames=total_frames,
        init_random_frames=init_random_frames, on_policy=on_policy, mode=mode, vectorization_mode=vectorization_mode,
        seed=seed, collection=collection, info=info,
    )  # fmt: skip
    state = None if resume is None else read_state(resume)
    if engine is None:
        fork_server(WORKERS)  # imports torch while this process does
    if overrides is NO_OVERRIDES:
        refuse_unknown_names(job, is_this_machine=engine is None)
    from cormorant_worker.fleet.fleet import WorkerFleet
    from cormorant_worker.fleet.options import FleetOptions
    from cormorant_worker.local_fleet import LocalFleet, owned

    # The first batch needs tensordict, whose import takes as long as workers take to start.
    importing = threading.Thread(target=import_module, args=("cormorant_worker.collect.batch",), daemon=True)
    importing.start()
    devices = {"device": device, "storing_device": storing_device}
    given: dict[str, Any] = {field: str(value) for field, value in devices.items() if value is not None}  # torch.device
    given |= {} if workers is None else {"workers": workers}
    options = FleetOptions() if options is None else options
    if overrides is not NO_OVERRIDES:
        given["overrides"] = (overrides.to_bytes(),)
    is_paused = options.starts_paused
    if state is not None:
        given["starts_paused"] = True  # a short job would end before the restore, and a dataset gets frames for good
    options = replace(options, **given)
    fleet = LocalFleet(WorkerFleet(job, options, engine=engine_of(engine)))
    owned(fleet._fleet, fleet)
    importing.join()
    if state is not None:
        try:
            fleet.restore(state)
            if not is_paused:
                fleet.resume()
        except BaseException:
            fleet.close()
            raise
    return fleet


def make_collector(
    manifest: Manifest | None = None,
    *,
    env: EnvChoice | None = None,
    policy: PolicyChoice | None = None,
    policy_factory: Callable[..., Any] | None = None,
    num_envs: int | None = None,
    vectorization_mode: Vectorization | None = None,
    seed: int | None = None,
    collection: Mapping[str, Any] | None = None,
    info: Sequence[str | Mapping[str, Any]] | None = None,
    device: str | None = None,
) -> "Collector":
    """Build one collector in this process: no workers, no queue, no dataset.

        with make_collector("examples/halfcheetah.yaml") as collector:
            batch = collector.collect(num_steps=10_000)        # exactly 10,000 frames, [B, T]
            played = collector.collect(num_episodes=20)        # exactly 20 whole episodes

    It has the random streams of the fleet's first worker. What concerns fleets is ignored: `output` and `workerGroups`,
    and of `collection` `framesPerBatch`, `totalFrames`, `mode`, `weights` and `preemptiveThreshold`.

    Args:
        manifest: as in `open_fleet`, and so is every argument that is not described here.
        env: as in `open_fleet`, in place of a manifest.
        policy: None: random actions.
        policy_factory: makes the policy from the spaces.
        num_envs: environments; None: 8.
        vectorization_mode: inline, the default: in this process; subprocess: one process per environment.
        seed: seed of the collector; None: 0.
        collection: further fields of `spec.collection`.
        info: as in `open_fleet`.
        device: torch device of the policy; None: "cpu".

    Raises:
        ManifestError: the manifest is refused; with every problem found, one per line.
        EnvError, PolicyError, WeightsError: an environment or the policy cannot be built.
    """
    from cormorant_worker.collect.build import build_collector
    from cormorant_worker.collect.place import WorkerPlace
    from cormorant_worker.envs.kinds import check_env

    job, overrides = describe_job(
        manifest, env, policy=policy, policy_factory=policy_factory, num_envs=num_envs,
        vectorization_mode=vectorization_mode, usual_vectorization="inline", seed=seed, collection=collection,
        info=info,
    )  # fmt: skip
    check_env(job.spec.env)
    collector = build_collector(job, WorkerPlace(device=device or "cpu", seed=job.spec.collection.seed), overrides)
    collector.keep_statistics()
    return collector


def engine_of(options: "RayOptions | None") -> "Engine | None":
    if options is None:
        return None
    from cormorant_worker.fleet.ray.engine import RayEngine  # local fleets do not need Ray installed

    return RayEngine(options)


def describe_job(
    manifest: Manifest | None, env: EnvChoice | None, **given: Any
) -> tuple[CollectorJob, WorkerOverrides]:
    """The job of a manifest or a script, and the script's objects. `given`: fields of `Scripted`. Raises ManifestError
    where neither or both are given, or the given one is refused.
    """
    if env is not None:
        if manifest is not None:
            raise ManifestError("manifest and env exclude each other; the manifest names its own environment")
        scripted = Scripted(env=env, **given)
        return scripted.job(), scripted.overrides()
    if manifest is None:
        raise ManifestError(
            'pass a manifest, for example open_fleet("job.yaml"), or env= and a function that makes one environment'
        )
    plain = Scripted(env="")
    changed = [name for name in given if name not in _ALSO_WITH_MANIFESTS and given[name] != getattr(plain, name)]
    if changed:
        raise ManifestError(f"{', '.join(changed)} cannot be combined with a manifest; set them there")
    return load_job(manifest), NO_OVERRIDES


def load_job(manifest: Manifest, *, name: str | None = None) -> CollectorJob:
    """Read a CollectorJob and put its folder on the import path.

    Args:
        manifest: path of a YAML file, a mapping, or a CollectorJob, which is returned as it is.
        name: metadata.name of the job, for files with several.

    Raises:
        ManifestError: the manifest is refused, with every problem found; or none of the file's jobs has that name.
    """
    source = "the manifest"
    try:
        if isinstance(manifest, CollectorJob):
            jobs = [manifest]
        elif isinstance(manifest, Mapping):
            jobs = [parse_job(dict(manifest))]
        else:
            source = os.fspath(manifest)
            jobs = load_jobs(source)
    except contract.ManifestError as error:
        raise ManifestError(str(error)) from error
    matching = [job for job in jobs if name in (None, job.metadata.name)]
    if len(matching) != 1:
        names = ", ".join(job.metadata.name for job in jobs)
        raise ManifestError(f"{source} holds the CollectorJobs {names}; choose one of them by its name")
    # This process and the workers it starts import from the manifest's folder, as from the job's `code` in pods.
    if isinstance(manifest, str | os.PathLike) and source != STDIN:
        folder = str(Path(source).resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return matching[0]


def refuse_unknown_names(job: CollectorJob, *, is_this_machine: bool = True) -> None:
    """Refuse unknown EnvPool tasks and entrypoints, with near matches, before any process is started.
    `is_this_machine`: workers import from the same folders as this process; others may have modules that are not here.
    Raises UnknownEnv, EnvBuildError and ManifestError.
    """
    from cormorant_worker.envs.kinds import check_env

    check_env(job.spec.env)
    if is_this_machine and (problems := missing_entrypoints(job)):
        raise ManifestError("\n".join(map(str, problems)))
