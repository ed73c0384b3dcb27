"""Inference servers beside policies in every worker: `python -m benchmarks.inference [row | device | memory | pong]`.

    row       what a row costs beside the network, 64 rows a message
    device    a policy of 20 ms an act on a device that one process has at a time, 8 environments in 4 workers
    memory    8 workers with a policy of 100 MB through one server, over one worker with it
    pong      Pong-64 with a CNN on the CPU: 2 workers and a server, over 2 workers

Every figure is a ratio, or a difference, of numbers from one run.
"""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from cormorant_worker.collect.build import build_policy
from cormorant_worker.collect.overrides import NO_OVERRIDES
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fork_server import WORKERS, fork_server
from cormorant_worker.inference.address import AssignedServers
from cormorant_worker.inference.connections import Greeting, listen
from cormorant_worker.inference.remote_actor import RemoteActor
from cormorant_worker.inference.server import Gathering, InferenceServer, ServedPolicy
from cormorant_worker.launch import load_job
from cormorant_worker.spaces import Space

SERVERS = [{"name": "cpu"}, {"name": "act", "role": "inference", "replicas": 1}]


class Device(torch.nn.Module):
    """Sleeps for 20 ms with a lock held that all processes share, in place of a device."""

    def __init__(self, lock: str, megabytes: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(max(1, megabytes * 250_000)))
        self._lock = lock

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self._lock:
            with Path(self._lock).open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(0.02)
        return torch.zeros(len(observation), dtype=torch.int64)


def device(observation_space: Any, action_space: Any, *, lock: str = "", megabytes: int = 0) -> torch.nn.Module:
    return Device(lock, megabytes)


def job(env: Mapping[str, Any], policy: Mapping[str, Any], frames: int, *, servers: bool) -> Any:
    spec: dict[str, Any] = {
        "env": env,
        "policy": policy,
        "collection": {"framesPerBatch": frames, "seed": 1},
        "output": {"queue": {"capacityBatches": 4}},
    }
    if servers:
        spec["workerGroups"] = SERVERS
    return load_job(
        {"apiVersion": "cormorant.dev/v1alpha1", "kind": "CollectorJob", "metadata": {"name": "bench"}, "spec": spec}
    )


def cartpole(num_envs: int) -> dict[str, Any]:
    return {"gymnasium": {"id": "CartPole-v1", "numEnvs": num_envs, "vectorization": "inline"}}


def frames_per_second(fleet: WorkerFleet, seconds: float) -> float:
    """Without the first two batches of each worker."""
    for _ in range(2 * len(fleet.stats().workers)):
        fleet.skip()
    began, frames = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        frames += fleet.skip()
    return frames / (time.monotonic() - began)


def row() -> None:
    """The server in a process of its own; the worker's act over the server's, and over its own."""
    made = job(cartpole(64), {"entrypoint": "cormorant.policies:mlp"}, 64, servers=False)
    env = gymnasium.make("CartPole-v1")
    spaces = env.observation_space, env.action_space
    cpu = torch.device("cpu")

    def build(observation: Space, action: Space, rows: int) -> ServedPolicy:
        found = build_policy(made, NO_OVERRIDES, observation, action, None, device=cpu, num_rows=rows)
        assert found is not None
        return found

    torch.set_num_threads(1)
    listener = listen()
    if not (child := os.fork()):
        server = InferenceServer(listener, build, Gathering(max_wait_s=0.0))
        while True:
            server.turn(torch.inference_mode)
    try:
        greeting = Greeting(name="w", observation_space=spaces[0], action_space=spaces[1], rows=64, num_slots=1)
        remote, local = RemoteActor(AssignedServers([listener.address]), greeting), build(*spaces, 64).actor
        obs, is_init = (np.zeros((64, 4), np.float32),), np.zeros(64, np.bool_)
        best = {"remote": np.inf, "local": np.inf}
        with torch.inference_mode():
            for _ in range(20):
                for name, actor in (("remote", remote), ("local", local)):
                    began = time.perf_counter()
                    for _ in range(200):
                        actor.act(obs, (), is_init)
                    best[name] = min(best[name], (time.perf_counter() - began) / 200)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    cost = (best["remote"] - best["local"]) / 64
    print(
        f"row: {best['remote'] * 1e6:.0f} us through a server, {best['local'] * 1e6:.0f} us alone: "
        f"{cost * 1e6:.2f} us a row (bar: 5)"
    )


def on_device() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        policy = {"entrypoint": "benchmarks.inference:device", "kwargs": {"lock": f"{folder}/lock"}}
        for servers in (False, True):
            with WorkerFleet(job(cartpole(2), policy, 20, servers=servers), FleetOptions(workers=4)) as fleet:
                found[servers] = frames_per_second(fleet, 8)
    ratio = found[True] / found[False]
    print(f"device: {found[True]:.0f} frames/s through a server, {found[False]:.0f} without: {ratio:.2f} (bar: 3)")


def memory() -> None:
    found = {}
    policy = {"entrypoint": "benchmarks.inference:device", "kwargs": {"megabytes": 100}}
    for servers, workers in ((False, 1), (True, 8), (False, 8)):
        with WorkerFleet(job(cartpole(2), policy, 20, servers=servers), FleetOptions(workers=workers)) as fleet:
            for _ in range(3 * workers):
                fleet.skip()
            pids = [worker.pid for worker in fleet.stats().workers]
            alone = sum(megabytes(pid, "Private_") for pid in pids)
            # The fork server's imports are shared by all: its part of them belongs to the fleet.
            pids.append(fork_server(WORKERS).pid)
            found[servers, workers] = sum(megabytes(pid, "Pss:") for pid in pids), alone
    one, served, many = found[False, 1], found[True, 8], found[False, 8]
    for i, what in enumerate(("all processes, shared pages once", "private pages of workers and server")):
        print(
            f"memory, {what}: 8 workers and a server {served[i]:.0f} MB, 1 worker {one[i]:.0f} MB: "
            f"{served[i] / one[i]:.2f} (bar: 1.3); 8 workers without a server {many[i]:.0f} MB: {many[i] / one[i]:.2f}"
        )


def megabytes(pid: int, kind: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def pong() -> None:
    env = {"envpool": {"taskId": "Pong-v5", "numEnvs": 64}}
    policy = {"entrypoint": "cormorant.policies:atari_cnn"}
    found = {}
    for servers in (False, True):
        with WorkerFleet(job(env, policy, 64 * 16, servers=servers), FleetOptions(workers=2)) as fleet:
            found[servers] = frames_per_second(fleet, 20)
    ratio = found[True] / found[False]
    print(f"pong: {found[True]:.0f} frames/s through a server, {found[False]:.0f} without: {ratio:.2f} (bar: 0.9)")


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["row", "device", "memory", "pong"]
    for name in chosen:
        {"row": row, "device": on_device, "memory": memory, "pong": pong}[name]()
