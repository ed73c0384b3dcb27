"""`env.envpool`: pools of the tasks that EnvPool ships, and how many of them a worker has."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import structlog

from cormorant_contract.env import Env, EnvPoolEnv
from cormorant_worker.envs.calibration import calibrate
from cormorant_worker.envs.cpus import native_threads
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.gymnasium_env import EnvSource, check_same, naming, words_of
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.envs.request import EnvRequest, OpenedEnvs
from cormorant_worker.errors import ManifestError
from cormorant_worker.spaces import Space

log = structlog.get_logger()

_PIXEL_RANK = 3
_MIN_ENVS_OF_TWO_GROUPS = 16


def check(env: Env) -> None:
    """Refuse what EnvPool does not know."""
    for name, task in _tasks(env).items():
        with naming(name):
            task.check()


def open_envs(request: EnvRequest) -> OpenedEnvs:
    """One pool for each EnvGroup, or for each variant that this worker plays, which share the threads of one pool."""
    before = native_threads()
    pools, num_threads = _build_pools(request)
    has_one_thread = num_threads == len(pools) == 1 and pools[0].lockstep
    return OpenedEnvs(pools, num_threads, native_threads() - before if has_one_thread else frozenset())


def open_episodes(request: EnvRequest, wrap: Callable[[EnvSource], EnvSource]) -> VectorEnv:
    """Open a pool; it takes no wrappers."""
    block, task, seeds = _block(request.env), _task(request.env), request.seeds
    task.check()
    threads = min(len(seeds), block.num_threads or request.threads)
    return task.open(num_threads=max(1, threads), seeds=seeds, info=request.info)


def _build_pools(request: EnvRequest) -> tuple[Sequence[VectorEnv], int]:
    """The pools, and how many threads each group has."""
    block, seeds, assignment, max_threads = _block(request.env), request.seeds, request.assignment, request.threads
    tasks = _tasks(request.env)
    check(request.env)
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
            tasks[""] = _limit_async(tasks[""], request.max_frames)
        elif request.is_served:
            env_groups = request.served_groups
        else:
            env_groups = _num_env_groups(tasks[""].spaces()[0], block.num_envs, max_threads)
        shares = [("", part.tolist()) for part in np.array_split(np.asarray(seeds), env_groups)]
    threads = block.num_threads or request.num_threads
    if not threads:
        task = tasks[max(shares, key=lambda share: len(share[1]))[0]]
        one_cpu = request.one_cpu and len(shares) == 1 and not is_async
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
    pools: list[VectorEnv] = []
    try:
        for name, own in shares:
            with naming(name):
                share = threads if assignment is None else max(1, round(threads * len(own) / len(seeds)))
                batch_size = block.batch_size if is_async else 0
                pools.append(tasks[name].open(num_threads=share, seeds=own, batch_size=batch_size, info=request.info))
    except BaseException:
        for pool in pools:
            pool.close()
        raise
    return pools, threads


def _limit_async(task: EnvPoolTask, max_frames: int) -> EnvPoolTask:
    """An asynchronous pool cuts trajectories by its own time limit, which is the same unless lives end episodes."""
    if not max_frames:
        return task
    if task.kwargs.get("episodic_life"):
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


def _tasks(env: Env) -> dict[str, EnvPoolTask]:
    """The EnvPool task of each variant by its name, or one under an empty name."""
    if not env.variants:
        return {"": _task(env)}
    return {variant.name: _task(env.of_variant(variant)) for variant in env.variants}


def _task(env: Env) -> EnvPoolTask:
    block = _block(env)
    return EnvPoolTask(
        task_id=block.task_id,
        kwargs=dict(block.kwargs),
        max_episode_steps=env.max_episode_steps,
        groups=block.groups or "all",
    )


def _block(env: Env) -> EnvPoolEnv:
    assert env.envpool is not None
    return env.envpool
