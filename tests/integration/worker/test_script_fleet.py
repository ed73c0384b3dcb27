"""A script or a notebook without a manifest: its own class, its own network, in workers of their own."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import gymnasium, numpy as np, torch
    from cormorant import open_fleet

    class Countdown(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.left = 10
            return np.array([10], np.float32), {}

        def step(self, action):
            self.left -= 1
            return np.array([self.left], np.float32), float(action), self.left == 0, False, {}

    network = torch.nn.Linear(1, 2)
    policy = lambda observation: network(observation).argmax(-1)

    sizes = dict(num_envs=2, workers=2, frames_per_batch=40, total_frames=200)
    with open_fleet(env=Countdown, policy=policy, **sizes) as fleet:
        batches = [batch.clone() for batch in fleet.batches()]
    observed = {float(value) for batch in batches for value in batch["observation"].flatten()}
    print(sum(batch.numel() for batch in batches), sorted(observed))
"""


@pytest.mark.parametrize("is_notebook", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_class_and_function_of_a_script_travel_to_the_workers(is_notebook: bool, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    # As in a notebook, __main__ has no file and its cells are compiled under names of their own.
    cells = f"exec(compile(open({str(path)!r}).read(), '<ipython-input-1>', 'exec'))"
    arguments = ["-c", cells] if is_notebook else [str(path)]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"200 {[float(value) for value in range(1, 11)]}"
