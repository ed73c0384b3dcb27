"""`env.envpool`: pools of the tasks that EnvPool ships, how many of them a worker has, and how many threads."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import structlog

from cormorant_contract.env import Env, EnvPoolEnv
from cormorant_worker.envs.cpus import OneCpu, native_threads
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.gymnasium_env import EnvSource, check_same, naming, words_of
from cormorant_worker.envs.protocol import EVERY_ROW, VectorEnv
from cormorant_worker.envs.request import EnvRequest, OpenedEnvs
from cormorant_worker.errors import ManifestError
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array

log = structlog.get_logger()

_PIXEL_RANK = 3
_MIN_ENVS_OF_TWO_GROUPS = 16
_PROBE_STEPS = 30
_SAMPLE = 4
"""Environments that tell, beside one alone, what each takes of a vector step."""
_CLEARLY_CHEAP_S = 100e-6
"""A vector step's work below which a second thread cannot win: waking it takes about as long."""
_CLEARLY_DEAR_S = 4e-3
"""A vector step's work above which every thread pays."""
_WORTH = 0.93
"""A larger number of threads must take less than this share of the time of the smaller one."""
_UNDISTURBED = 0.25
"""The quantile of a probe's steps that counts: whatever else runs only makes steps slower."""
_AGAIN = 2
"""Times that both are probed again before the smaller number wins: 50 ms of something else can fill a whole probe."""


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
        task = tasks[""]
        if is_async:
            # Such a pool cuts trajectories by its own time limit, which is the same unless lives end episodes.
            if (limit := request.max_frames) and task.kwargs.get("episodic_life"):
                raise ManifestError(
                    "spec.collection.maxFramesPerTrajectory with episodic_life needs batchSize = numEnvs; set "
                    "batchSize: 0"
                )
            if limit:
                tasks[""] = replace(task, max_episode_steps=min(task.max_episode_steps or limit, limit))
        elif request.is_served:
            env_groups = request.served_groups
        elif block.num_envs >= _MIN_ENVS_OF_TWO_GROUPS and max_threads > 1:
            # Two where the policy is expensive (pixels): one steps while the policy acts for the other. Decided by the
            # manifest and the CPU limit and not by timing, so that a fixed seed reproduces a run.
            observation = task.spaces()[0]
            if len(observation.shape or ()) == _PIXEL_RANK and observation.dtype == np.uint8:
                env_groups = 2
        shares = [("", part.tolist()) for part in np.array_split(np.asarray(seeds), env_groups)]
    threads = block.num_threads or request.num_threads
    if not threads:
        task = tasks[max(shares, key=lambda share: len(share[1]))[0]]
        one_cpu = request.one_cpu and len(shares) == 1 and not is_async
        threads, step_seconds = calibrate(task, num_envs=block.num_envs, max_threads=max_threads, one_cpu=one_cpu)
        # With two groups, the policy needs a CPU while one of them steps.
        threads = max(1, threads - (env_groups - 1))
        if step_seconds:
            log.info(
                "threads_calibrated",
                task_id=task.task_id,
                num_envs=block.num_envs,
                num_threads=threads,
                env_groups=env_groups,
                step_seconds={threads: round(seconds, 6) for threads, seconds in step_seconds.items()},
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


def calibrate(
    task: EnvPoolTask, *, num_envs: int, max_threads: int, one_cpu: bool = False
) -> tuple[int, dict[int, float]]:
    """Find the best number of threads for `num_envs` environments, at most `max_threads`, by timing a few steps: well
    under a second for cheap environments. Returns it, and the seconds of one vector step by number of threads, where it
    was timed. Replacements get the result, so that they do not calibrate again.

    More threads help as long as a vector step takes longer than waking them: cheap environments (CartPole) are faster
    on one, Atari on all that the CPU limit allows. `one_cpu`: a single thread will share the CPU of the thread that
    calls the policy (cpus.py), and is timed there.
    """
    if max_threads == 1 or num_envs == 1:
        return 1, {}
    # What a vector step costs however few step would count for each, were one environment alone the measure. That cost
    # varies least on one CPU and in the fastest steps.
    alone_s, several_s = (_times(task, num_envs=n, num_threads=1, one_cpu=True).min() for n in (1, _SAMPLE))
    work_s = (several_s - alone_s) / (_SAMPLE - 1) * num_envs
    if work_s > _CLEARLY_DEAR_S:
        return min(max_threads, num_envs), {}
    if work_s < _CLEARLY_CHEAP_S:
        return 1, {}

    def time_steps(threads: int) -> float:
        times = _times(task, num_envs=num_envs, num_threads=threads, one_cpu=one_cpu and threads == 1)
        return float(np.quantile(times, _UNDISTURBED))

    best, most = 1, min(max_threads, num_envs)
    timed = {best: time_steps(best)}
    for threads in [*(1 << power for power in range(1, (most - 1).bit_length())), most]:
        timed[threads] = time_steps(threads)
        for _ in range(_AGAIN):
            if timed[threads] <= timed[best] * _WORTH:
                break
            timed |= {n: min(timed[n], time_steps(n)) for n in (best, threads)}
        if timed[threads] > timed[best] * _WORTH:
            break
        best = threads
    return best, timed


def _times(task: EnvPoolTask, *, num_envs: int, num_threads: int, one_cpu: bool = False) -> Array:
    # Seconds of a few vector steps with random actions.
    before = native_threads()
    env = task.open(num_threads=num_threads, seeds=list(range(num_envs)))
    actor = RandomActor(env.action_space, seed=0)
    is_init = np.zeros(num_envs, dtype=np.bool_)
    env.start()
    seconds = []
    with OneCpu(native_threads() - before if one_cpu else frozenset()):
        for _ in range(_PROBE_STEPS):
            actions = actor.act((), (), is_init).actions
            began = time.perf_counter()
            env.send(actions, EVERY_ROW)
            env.recv()
            seconds.append(time.perf_counter() - began)
    env.close()
    return np.array(seconds)


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
