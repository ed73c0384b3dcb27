"""`make gpu`: everything that needs a CUDA device, in under ten minutes. Exits with 1 where there is none.

    tests        pytest -m gpu
    collectors   EnvPool and a CUDA policy: ours beside TorchRL's collector (benchmarks/peers/setup), interleaved
    vector       a CartPole on the device as a vector environment, 4,096 and 65,536 environments: ours over a bare torch
                 loop that keeps everything on the device, interleaved, and launches and copies per step of each; ours
                 step by step and with its steps recorded as CUDA graphs
    server       an inference server on the device for two workers, over policies in the workers
    publish      from a publish to the workers' receipts

`--device cpu` tries the command itself on a machine without a device; its figures mean nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from examples.torch_cartpole import TorchCartPole
from rich.console import Console

from benchmarks import report
from benchmarks.contenders import BARE, PEERS_PYTHON, ROOT, Contender
from benchmarks.micro.rows import row
from benchmarks.runner import run_workload
from cormorant import make_collector, open_fleet
from cormorant.policies import atari_cnn, mlp

WORKLOAD = "pong-64"
SIZES = (4096, 65_536)
STEPS = 32
"""Of every environment in a batch of `vector`."""


def main() -> int:
    args = _parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("make gpu: PyTorch finds no CUDA device on this machine, and nothing was run.", file=sys.stderr)
        return 1
    console = Console(width=120)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU, as a trial of this command"
    results: dict[str, Any] = {"machine": report.machine(), "device": device, "micro": {}}
    console.print(f"on {device}")
    # Collecting all of tests/ takes a minute.
    files = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files], cwd=ROOT, check=False
    ).returncode
    outcomes = run_workload(
        _contenders(args.device), WORKLOAD, rounds=args.rounds, seconds=args.seconds, say=console.print
    )
    results["collectors"] = report.workload_to_json(outcomes)
    report.print_workload(console, f"{WORKLOAD}, policy on {args.device}", results["collectors"])
    measures = {"vector": _vector, "server": _server, "publish": _publish}
    for name, measure in measures.items():
        results["micro"][name] = {"rows": list(measure(args.device, args.seconds))}
    report.print_micro(console, results["micro"])
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1))
    console.print(f"written to {args.json}", highlight=False, soft_wrap=True)
    # 5: no test was selected.
    return 0 if tests in (0, 5) else 1


def _contenders(device: str) -> list[Contender]:
    on_device = ("--device", device)
    found = [
        BARE,
        Contender(name="cormorant, in process", module="benchmarks.ours", arguments=("--workers", "0", *on_device)),
        Contender(name="cormorant, 2 workers", module="benchmarks.ours", arguments=("--workers", "2", *on_device)),
    ]
    if PEERS_PYTHON.exists():
        torchrl = "benchmarks.peers.torchrl_collectors"
        found.append(Contender(name="TorchRL Collector", module=torchrl, arguments=on_device, python=PEERS_PYTHON))
    return found


def _vector(device: str, seconds: float) -> Iterator[dict]:
    for size in SIZES:
        env = {
            "vector": {
                "entrypoint": "examples.torch_cartpole:TorchCartPole",
                "numEnvs": size,
                "kwargs": {"device": device},
            }
        }
        with ExitStack() as opened:
            calls: dict[str, Callable[[], object]] = {"bare": _bare(size, device)}
            for name, mode in (("ours", "off"), ("ours, recorded", "auto")):
                policy = {"entrypoint": "cormorant.policies:mlp", "compile": mode}
                job = _job({"env": env, "policy": policy, "collection": {"framesPerBatch": STEPS * size}})
                collector = opened.enter_context(make_collector(job, device=device))
                calls[name] = partial(collector.collect, num_steps=STEPS * size)
            rates: dict[str, list[float]] = {name: [] for name in calls}
            for call in [*calls.values()] * 2:
                call()
            began = time.perf_counter()
            while time.perf_counter() - began < 2 * seconds or len(rates["ours"]) < 3:
                for name, call in calls.items():
                    at = time.perf_counter()
                    call()
                    rates[name].append(STEPS * size / (time.perf_counter() - at))
            what = f"CartPole on the device x {size:,}"
            for name, call in calls.items():
                yield row(f"{what}, {name}", median(rates[name]), "frames/s", note=_launches(call))
            for name in ("ours", "ours, recorded"):
                ratios = [ours / bare for ours, bare in zip(rates[name], rates["bare"], strict=True)]
                yield row(f"{what}, {name} over the bare loop", median(ratios), "x", bar=">= 0.9")


def _bare(size: int, device: str) -> Callable[[], None]:
    """A loop that keeps what ours keeps, and waits once a batch."""
    env = TorchCartPole(size, device)
    policy = mlp(env.single_observation_space, env.single_action_space).to(device)
    env.reset(seed=0)
    kept = [torch.empty(STEPS, size, *shape, device=device) for shape in ((4,), (), (), (4,))]

    def batch() -> None:
        with torch.no_grad():
            for t in range(STEPS):
                kept[0][t] = env.state
                action = policy(env.state)
                _, _, terminated, truncated, info = env.step(action)
                for rows, value in zip(kept[1:], (action, terminated | truncated, info["final_obs"]), strict=True):
                    rows[t] = value
        if device == "cuda":
            torch.cuda.synchronize()

    return batch


def _launches(call: Callable[[], object]) -> str:
    """How many launches, kernels and copies a step takes, by a trace of one batch; empty where there is no device."""
    if not torch.cuda.is_available():
        return ""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        call()
    names = [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    up, down = (sum(f"Memcpy {kind}" in name for name in names) for kind in ("HtoD", "DtoH"))
    kernels = sum(not name.startswith(("Memcpy", "Memset")) for name in names)
    launches = sum("Launch" in event.name and event.name.startswith("cu") for event in trace.events())
    counts = launches / STEPS, kernels / STEPS, up / STEPS, down / STEPS
    return "per step: {:.1f} launches of {:.1f} kernels, {:.1f} copies to the device, {:.1f} back".format(*counts)


def _server(device: str, seconds: float) -> Iterator[dict]:
    for name, servers in (("policies in two workers", []), ("one server for two workers", [{"name": "act"}])):
        kind = "gpu" if device == "cuda" else "cpu"
        groups: list[dict] = [{"name": "cpu", "device": "cpu" if servers else kind}]
        groups += [{**server, "role": "inference", "device": kind, "replicas": 1} for server in servers]
        with open_fleet(_pong(groups)) as fleet:
            batches, frames = fleet.batches(), 0
            next(batches)
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                frames += next(batches).numel()
            yield row(name, frames / (time.perf_counter() - began), "frames/s")


def _publish(device: str, seconds: float) -> Iterator[dict]:
    groups = [{"name": "main", "device": "gpu" if device == "cuda" else "cpu"}]
    with open_fleet(_pong(groups)) as fleet:
        policy, waits = atari_cnn(*fleet.spaces).to(device), list[float]()
        batches, began = fleet.batches(), time.perf_counter()
        while len(waits) < 5 or time.perf_counter() - began < seconds:
            next(batches)
            at = time.perf_counter()
            fleet.publish(policy, wait=30)
            waits.append(time.perf_counter() - at)
        yield row("publish until two workers have applied it", 1000 * median(waits), "ms")


def _pong(groups: list[dict]) -> dict:
    return _job(
        {
            "env": {"envpool": {"taskId": "Pong-v5", "numEnvs": 32}},
            "policy": {"entrypoint": "cormorant.policies:atari_cnn"},
            "collection": {"mode": "async", "framesPerBatch": 512, "seed": 7},
            "workerGroups": groups,
            "replicas": 2,
        }
    )


def _job(spec: dict) -> dict:
    head = {"apiVersion": "cormorant.dev/v1alpha1", "kind": "CollectorJob", "metadata": {"name": "gpu"}}
    return {**head, "spec": spec}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
