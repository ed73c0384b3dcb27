"""The yardstick: one process that steps EnvPool with a policy and keeps nothing. Never tuned down.

`--kind field` is the bare loop of every ratio: gymnasium API, as many EnvPool threads as cores, one torch thread,
`torch.distributions` as people write it. `--kind tuned` is the same loop with the policy that this project ships: the
same layers, sampled in fewer calls.
Workloads with the random policy step EnvPool alone with actions that were sampled beforehand. `--kind envs` does so for
every workload, and `--kind policy` calls our policy on the same observations again and again: the two parts of the CPU
limit (report.py).
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import envpool
import numpy as np
import torch

from benchmarks import protocol
from benchmarks.networks import Sampler, build_network
from benchmarks.workloads import Workload, num_cores

CHUNK_STEPS = 32
PRESAMPLED = 256


def build_pool(workload: Workload, *, num_envs: int = 0, num_threads: int = 0, seed: int = 7) -> Any:
    """EnvPool with its gymnasium API; by default all environments of the workload, a thread a core."""
    return envpool.make(
        workload.task_id,
        env_type="gymnasium",
        num_envs=num_envs or workload.num_envs,
        num_threads=num_threads or num_cores(),
        seed=seed,
    )


@contextmanager
def open_bare(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    env = build_pool(workload, num_threads=args.env_threads)
    if workload.policy == "random" or args.kind == "envs":
        run = _random_loop(env, workload)
    elif args.kind == "policy":
        run = _policy_alone(env, workload)
    else:
        run = _policy_loop(env, workload, args.kind)
    with torch.inference_mode():
        valid = 1.0 if args.kind == "policy" else 1.0 - _phantom_share(run, workload)
        chunk_frames = round(CHUNK_STEPS * workload.num_envs * valid)

        def take() -> int:
            run(CHUNK_STEPS)
            return chunk_frames

        yield take
    env.close()


Run = Callable[..., None]
"""Makes n vector steps. With a list, appends each step's flags to it (only outside of measurements)."""


def _policy_loop(env: Any, workload: Workload, kind: str) -> Run:
    if kind == "field":
        act = Sampler(build_network(workload, env.observation_space, env.action_space))
    else:
        act = _own_policy(workload, env)
    obs, _ = env.reset()

    def run(steps: int, flags: list[np.ndarray] | None = None) -> None:
        nonlocal obs
        for _ in range(steps):
            action = act(torch.from_numpy(obs)).numpy()
            obs, _reward, terminated, truncated, _info = env.step(action)
            if flags is not None:
                flags.append(terminated | truncated)

    return run


def _policy_alone(env: Any, workload: Workload) -> Run:
    act = _own_policy(workload, env)
    obs, _ = env.reset()

    def run(steps: int, flags: list[np.ndarray] | None = None) -> None:
        for _ in range(steps):
            act(torch.from_numpy(obs)).numpy()

    return run


def _own_policy(workload: Workload, env: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """This project's policy: the same layers, its own way to sample."""
    from cormorant import policies  # the plain bare loop needs nothing of this project

    factory = {"mlp": policies.mlp, "atari_cnn": policies.atari_cnn}[workload.policy]
    return factory(env.observation_space, env.action_space).eval()


def _random_loop(env: Any, workload: Workload) -> Run:
    generator = np.random.default_rng(7)
    space = env.action_space
    shape = (PRESAMPLED, workload.num_envs, *space.shape)
    if hasattr(space, "n"):
        presampled = generator.integers(space.n, size=shape, dtype=np.int32)
    else:
        presampled = generator.uniform(space.low, space.high, size=shape).astype(space.dtype)
    actions = cycle(list(presampled))
    env.reset()

    def run(steps: int, flags: list[np.ndarray] | None = None) -> None:
        for _ in range(steps):
            _obs, _reward, terminated, truncated, _info = env.step(next(actions))
            if flags is not None:
                flags.append(terminated | truncated)

    return run


def _phantom_share(run: Run, workload: Workload) -> float:
    """Each `done` is followed by a step whose action EnvPool drops: counted apart, so that counting costs nothing."""
    if not workload.phantom_steps:
        return 0.0
    flags: list[np.ndarray] = []
    run(workload.phantom_steps, flags)
    # Two done flags in a row would be the end of a one-step episode after its phantom; none of these tasks has one.
    return float(np.mean(flags))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=("field", "tuned", "envs", "policy"), default="field")
    parser.add_argument("--env-threads", type=int, default=0, help="0 = as many as cores")


if __name__ == "__main__":
    protocol.main(open_bare, _arguments)
