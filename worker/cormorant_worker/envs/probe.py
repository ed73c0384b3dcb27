"""Builds and steps an EnvPool task in a process that may die: some arguments abort or end the process that uses them.

A fleet needs no probe, because its workers are such processes. Code that collects in its own process calls it first.
"""

import json
import signal
import subprocess
import sys

from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.protocol import EVERY_ROW
from cormorant_worker.errors import CormorantError, EnvBuildError

_NUM_ENVS, _STEPS = 2, 4
_TIMEOUT_S = 120.0


def probe(task: EnvPoolTask) -> None:
    """Refuse arguments that kill the process that builds or steps with them. Takes some seconds."""
    told = json.dumps([task.task_id, dict(task.kwargs), task.max_episode_steps])
    named = f"EnvPool's {task.task_id} with kwargs {dict(task.kwargs)}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, told], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvBuildError(
            f"{named} did not complete {_STEPS} steps within {_TIMEOUT_S:.0f} s; check its arguments"
        ) from error
    if done.returncode:
        code = done.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = (done.stderr or done.stdout).strip().splitlines()
        raise EnvBuildError(f"a process that built {named} {how}; check its arguments{f': {last[-1]}' if last else ''}")


if __name__ == "__main__":
    try:
        task_id, kwargs, limit = json.loads(sys.argv[1])
        task = EnvPoolTask(task_id=task_id, kwargs=kwargs, max_episode_steps=limit)
        env = task.open(num_threads=1, seeds=list(range(_NUM_ENVS)))
        env.start()
        for _ in range(_STEPS):
            env.send(env.dummy_actions, EVERY_ROW)
            env.recv()
    except CormorantError as refused:
        sys.exit(str(refused))
