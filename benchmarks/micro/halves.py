"""What two workers could reach of the CPU limit, if nothing but EnvPool and the policy cost them time.

The limit is reckoned with all environments in one pool and one call of the policy. Two workers have half of them each,
and pay twice what a pool and a policy cost per call. CPU time per frame of one half, on one CPU, by what is done:

    loop       EnvPool and the policy, nothing else; the policy sees phantom steps, which are not counted
    no phantom the same, with EnvPool's late resets as steps of their own, as exact batches need them
    collector  the same, stored in batches

`python -m benchmarks.micro.halves [workload]...`; shares of the limit, the best of several rounds each.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.bare import Run, _own_policy, _phantom_share, _policy_alone, _random_loop, build_pool
from benchmarks.ours import make_job
from benchmarks.workloads import WORKLOADS, Workload
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.build import build_collector
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs.envpool import EnvPoolVectorEnv
from cormorant_worker.envs.protocol import EVERY_ROW

ROUNDS = 7
SECONDS = 1.0


def cpu_us(run: Callable[[int], object], steps: int, frames: float) -> float:
    """Microseconds of CPU time per frame, of all threads. `frames`: of one vector step."""
    began, cpu, n = time.monotonic(), time.process_time(), 0
    while time.monotonic() < began + SECONDS:
        run(steps)
        n += steps
    return (time.process_time() - cpu) / (n * frames) * 1e6


def looped(workload: Workload, num_envs: int) -> tuple[Run, float]:
    """The loop, and frames per vector step without phantoms."""
    env = build_pool(workload, num_envs=num_envs, num_threads=1)
    act = _own_policy(workload, env)
    obs, _ = env.reset()

    def run(steps: int, flags: list[np.ndarray] | None = None) -> None:
        nonlocal obs
        for _ in range(steps):
            obs, _reward, terminated, truncated, _info = env.step(act(torch.from_numpy(obs)).numpy())
            if flags is not None:
                flags.append(terminated | truncated)

    return run, num_envs * (1 - _phantom_share(run, workload))


def without_phantoms(workload: Workload, num_envs: int) -> Run:
    pool = build_pool(workload, num_envs=num_envs, num_threads=1)
    act, env = _own_policy(workload, pool), EnvPoolVectorEnv.around(pool)
    (obs,) = env.start()

    def run(steps: int, flags: list[np.ndarray] | None = None) -> None:
        nonlocal obs
        for _ in range(steps):
            env.send((act(torch.from_numpy(obs)).numpy(),), EVERY_ROW)
            (obs,) = env.recv().obs

    return run


def collected(workload: Workload) -> Run:
    collector = build_collector(make_job(workload, workers=2), WorkerPlace(seed=7)).collector
    blocks = [Block(collector.layout(workload.steps_per_batch)) for _ in range(2)]

    def run(steps: int, flags: list[np.ndarray] | None = None) -> None:
        for _ in range(steps // workload.steps_per_batch):
            blocks.reverse()
            collector.fill(blocks[0], blocks[0].layout.num_frames)

    return run


def on_one_cpu() -> None:
    """This thread, and all that it starts from now on."""
    os.sched_setaffinity(0, {int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])})


def measure(workload: Workload) -> None:
    whole = build_pool(workload)
    envs, policy = _random_loop(whole, workload), _policy_alone(build_pool(workload), workload)
    frames = workload.num_envs * (1 - _phantom_share(envs, workload))
    on_one_cpu()
    half = workload.num_envs // 2
    loop, looped_frames = looped(workload, half)
    runs: dict[str, tuple[Run, float]] = {
        "envs": (envs, frames),
        "policy": (policy, workload.num_envs),
        "loop": (loop, looped_frames),
        "no phantom": (without_phantoms(workload, half), half),
        "collector": (collected(workload), half),
    }
    best = dict.fromkeys(runs, np.inf)
    for _ in range(ROUNDS):
        for name, (run, per_step) in runs.items():
            best[name] = min(best[name], cpu_us(run, workload.steps_per_batch, per_step))
    limit = best["envs"] + best["policy"]
    print(f"{workload.name}: limit {limit:.2f} us a frame (EnvPool {best['envs']:.2f}, policy {best['policy']:.2f})")
    for name in ("loop", "no phantom", "collector"):
        print(f"  {name:10} {half} environments: {best[name]:.2f} us a frame, {limit / best[name]:.2f} of the limit")


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or ["cartpole-64", "halfcheetah-64", "pong-64"]
    with torch.inference_mode():
        for name in chosen:
            measure(WORKLOADS[name])
