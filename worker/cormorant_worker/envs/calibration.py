"""Finds the best number of EnvPool threads by timing a few steps at the start.

More threads help as long as a vector step takes longer than waking them: cheap environments (CartPole) are faster on
one, Atari on all that the CPU limit allows. A single thread is timed on the CPU of the policy's
thread if it will run there (cpus.py). Replacements get the result, so that they do not calibrate again.
"""

import time
from dataclasses import dataclass

import numpy as np

from cormorant_worker.envs.cpus import OneCpu, native_threads
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.protocol import EVERY_ROW
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    num_threads: int
    step_seconds: dict[int, float]
    """Seconds of one vector step by number of threads, where it was timed."""


def calibrate(task: EnvPoolTask, *, num_envs: int, max_threads: int, one_cpu: bool = False) -> Calibration:
    """Find the number of threads for `num_envs` environments, at most `max_threads`.

    Takes well under a second for cheap environments; for expensive ones a few steps suffice.

    Args:
        one_cpu: a single thread will share the CPU of the thread that calls the policy.
    """
    if max_threads == 1 or num_envs == 1:
        return Calibration(num_threads=1, step_seconds={})
    # What a vector step costs however few step would count for each, were one environment alone the measure. That cost
    # varies least on one CPU and in the fastest steps.
    alone_s, several_s = (_times(task, num_envs=n, num_threads=1, one_cpu=True).min() for n in (1, _SAMPLE))
    work_s = (several_s - alone_s) / (_SAMPLE - 1) * num_envs
    if work_s > _CLEARLY_DEAR_S:
        return Calibration(num_threads=min(max_threads, num_envs), step_seconds={})
    if work_s < _CLEARLY_CHEAP_S:
        return Calibration(num_threads=1, step_seconds={})

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
    return Calibration(num_threads=best, step_seconds=timed)


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
