"""Seconds until the first batch of CartPole, from the start of the process.

    python -m benchmarks.opening [--rounds 5]

    plain      a loop over 8 gymnasium environments with a torch policy, in one process
    fleet      open_fleet with the same policy, 2 workers with 8 environments, inline or in subprocesses
    second     another fleet of the same process
    run        `cormorant run` with EnvPool's CartPole and a random policy, to its end

Each is measured in a fresh process, in turn.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_POLICY = """
import torch
network = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
policy = lambda observation: network(observation).argmax(-1)
"""
_PLAIN = f"""{_POLICY}
import gymnasium
envs = gymnasium.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync")
obs, _ = envs.reset(seed=0)
for _ in range(64):
    with torch.no_grad():
        obs, *_ = envs.step(policy(torch.from_numpy(obs)).numpy())
print("done")
"""
_FLEET = f"""{_POLICY}
import time
from cormorant import open_fleet
for name in ("fleet", "second"):
    began = time.time()
    with open_fleet(env="CartPole-v1", policy=policy, workers=2, vectorization_mode="VECTORIZATION") as fleet:
        fleet.next_batch()
        print(name, began, time.time())
"""
_JOB = """
apiVersion: cormorant.dev/v1alpha1
kind: CollectorJob
metadata: {name: opening}
spec:
  env: {envpool: {taskId: CartPole-v1, numEnvs: 8}}
  policy: {random: {}}
  collection: {framesPerBatch: 256, totalFrames: 512}
  output: {queue: {}}
  replicas: 2
"""


def seconds(command: list[str]) -> dict[str, float]:
    """Until the process printed what its script prints last, or ended."""
    began = time.time()
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    times = [line.split() for line in done.stdout.splitlines() if line.startswith(("fleet ", "second "))]
    if not times:
        return {"": time.time() - began}
    return {name: float(to) - (began if name == "fleet" else float(since)) for name, since, to in times}


def main() -> None:
    """Print the median, the least and the most of each."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.opening", description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    rounds = options.parse_args().rounds
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(_JOB)
        command = Path(sys.executable).with_name("cormorant")
        contenders = {"plain": [sys.executable, "-c", _PLAIN], "run": [str(command), "run", str(job)]}
        for kind in ("inline", "subprocess"):
            contenders[kind] = [sys.executable, "-c", _FLEET.replace("VECTORIZATION", kind)]
        for _ in range(rounds):
            for name, command_line in contenders.items():
                for part, took in seconds(command_line).items():
                    found.setdefault(f"{part or name}{f', {name}' if part else ''}", []).append(took)
    for name, values in found.items():
        print(f"{name:20} {statistics.median(values):5.2f} s ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
