"""How cost grows, as curves: `python -m benchmarks.cost [--quick] [--only NAME]`, about 11 minutes on 2 idle cores.

    workers       frames per second and memory over real local worker processes, 8 CartPoles each
    environments  memory of one worker over its environments
    batch         frames per second over frames per batch, 64 CartPoles in one worker
    observation   frames per second over bytes of an observation, an environment that only fills it
    publish       seconds from a publish until every worker acts with it, over bytes of the model
    head          processor time of the head for a batch that a client takes over HTTP, over bytes of the batch

Each point is measured in a process of its own. Thousands of workers: `python -m benchmarks.head`.
Writes JSON, and one plot a curve to docs/images (with --quick: beside the JSON); `--draw` only draws the JSON's plots.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import psutil
import torch
from gymnasium.vector.utils import batch_space
from torch import nn

from benchmarks import protocol
from benchmarks.chart import IMAGE, STYLE
from benchmarks.contenders import ROOT
from benchmarks.micro import heads
from benchmarks.ours import open_local_fleet
from benchmarks.report import machine
from benchmarks.runner import environment
from cormorant_contract.job import CollectorJob
from cormorant_worker.local_fleet import LocalFleet

_SECONDS = 3.0
_LIMIT_S = 180.0
_VECTOR_ENVS, _VECTOR_STEPS = 16, 16
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 300)
MODELS = tuple(round(megabytes * 1e6) for megabytes in (0.1, 1, 10, 40, 100, 400))
OBSERVATIONS = (64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)
Point = dict[str, float]
"""Of one size: what was measured, by name."""


# -- what is collected -----------------------------------------------------------------------------------------


class Filled(gymnasium.vector.VectorEnv):
    """Observations of so many bytes, rewritten in every step; episodes of 1,000 steps."""

    def __init__(self, num_envs: int, size_bytes: int) -> None:
        self.num_envs, self._step = num_envs, 0
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (size_bytes,), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._obs = np.zeros((num_envs, size_bytes), np.uint8)
        self._elapsed = np.zeros(num_envs, np.int64)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self._elapsed[(options or {}).get("reset_mask", slice(None))] = 0
        return self._obs, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        self._step += 1
        self._elapsed += 1
        self._obs.fill(self._step % 256)
        over = self._elapsed >= 1000
        return self._obs, np.ones(self.num_envs, np.float32), np.zeros(self.num_envs, bool), over, {}


class Ballast(nn.Module):
    """Always the first action, with so many bytes of weights."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size_bytes // 4))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(observation), dtype=torch.int64)


def make_ballast(observation_space: Any, action_space: Any, *, size_bytes: int) -> nn.Module:
    return Ballast(size_bytes)


def make_job(env: dict, frames: int, *, policy: dict | None = None, workers: int = 1) -> dict:
    return {
        "apiVersion": "cormorant.dev/v1alpha1",
        "kind": "CollectorJob",
        "metadata": {"name": "cost"},
        "spec": {
            "env": env,
            "policy": policy or {"random": {}},
            "collection": {"mode": "async", "framesPerBatch": frames, "seed": 7},
            "output": {"queue": {"capacityBatches": 2 * workers}},
            "replicas": workers,
        },
    }


def pool(task: str, num_envs: int) -> dict:
    return {"envpool": {"taskId": task, "numEnvs": num_envs, "numThreads": 1}}


def filled(size_bytes: int) -> dict:
    kwargs = {"size_bytes": size_bytes}
    return {"vector": {"entrypoint": "benchmarks.cost:Filled", "numEnvs": _VECTOR_ENVS, "kwargs": kwargs}}


MLP = {"entrypoint": "cormorant.policies:mlp"}


def collect(document: dict, seconds: float, *, workers: int = 1) -> Point:
    """Frames per second, and memory of the worker processes; pages that they share count once."""
    with open_local_fleet(CollectorJob.model_validate(document), workers=workers) as fleet:
        batches = LocalFleet(fleet).batches()
        took = protocol.measure(lambda: sum(next(batches).numel() for _ in range(workers)), seconds, settle_takes=3)
        pss = sum(child.memory_full_info().pss for child in psutil.Process().children(recursive=True))
    return {"frames/s": took["frames"] / took["seconds"], "MB": pss / 1e6}


# -- points ----------------------------------------------------------------------------------------------------


def workers(number: int, seconds: float) -> Point:
    return collect(make_job(pool("CartPole-v1", 8), 8 * 128, policy=MLP, workers=number), seconds, workers=number)


def environments(number: int, seconds: float) -> Point:
    cheap = {"gymnasium": {"id": "CartPole-v1", "vectorization": "inline", "numEnvs": number}}
    found = {"CartPole, gymnasium": cheap, "HalfCheetah, EnvPool": pool("HalfCheetah-v4", number)}
    found["Pong, EnvPool"] = pool("Pong-v5", number)
    # As many frames in every batch: what grows is what an environment needs.
    return {name: collect(make_job(env, 512), 0.2)["MB"] for name, env in found.items()}


def batch(frames: int, seconds: float) -> Point:
    return {
        f"{number} worker{'s' * (number > 1)}": collect(
            make_job(pool("CartPole-v1", 64), frames, policy=MLP, workers=number), seconds, workers=number
        )["frames/s"]
        for number in (1, 2)
    }


def observation(size_bytes: int, seconds: float) -> Point:
    rate = collect(make_job(filled(size_bytes), _VECTOR_ENVS * _VECTOR_STEPS), seconds)["frames/s"]
    return {"frames/s": rate, "MB/s": rate * size_bytes / 1e6}


def publish(size_bytes: int, seconds: float) -> Point:
    policy = {"entrypoint": "benchmarks.cost:make_ballast", "kwargs": {"size_bytes": size_bytes}}
    document = make_job(pool("CartPole-v1", 8), 64, policy=policy, workers=2)
    weights = {"weight": torch.zeros(size_bytes // 4)}
    with open_local_fleet(CollectorJob.model_validate(document), workers=2) as fleet:
        local, batches = LocalFleet(fleet), LocalFleet(fleet).batches()
        found = {"2 local workers": _publishes(lambda: local.publish(weights).wait(60), lambda: next(batches), seconds)}
    with heads.running(document, workers=2) as head, head.client.deliveries(memory="never") as deliveries:
        found["over HTTP"] = _publishes(
            lambda: head.client.publish(weights, wait=60), lambda: next(deliveries), seconds
        )
    return found


def _publishes(once: Callable[[], object], take: Callable[[], object], seconds: float) -> float:
    """Milliseconds; batches are taken between two, so that workers do not wait for room."""
    found, until = list[float](), time.perf_counter() + seconds
    while len(found) < 4 or time.perf_counter() < until:
        for _ in range(4):
            take()
        began = time.perf_counter()
        once()
        found.append(1e3 * (time.perf_counter() - began))
    return median(found[1:])


def head(size_bytes: int, seconds: float) -> Point:
    document = make_job(filled(size_bytes // (_VECTOR_ENVS * _VECTOR_STEPS)), _VECTOR_ENVS * _VECTOR_STEPS)
    with heads.running(document, workers=1) as running, running.client.deliveries(memory="never") as batches:
        process = psutil.Process(running.pid)
        for _ in range(5):
            next(batches)
        taken, before, until = 0, _cpu_ms(process), time.perf_counter() + seconds
        while taken < 5 or time.perf_counter() < until:
            next(batches)
            taken += 1
        return {"ms": (_cpu_ms(process) - before) / taken, "batches/s": taken / seconds}


def _cpu_ms(process: psutil.Process) -> float:
    """Of this process alone, not of its workers."""
    times = process.cpu_times()
    return 1e3 * (times.user + times.system)


# -- curves ----------------------------------------------------------------------------------------------------

Axes = tuple[str, str, Sequence[str]]
"""What x is, what y is, and which series are drawn (none: all)."""
CURVES: dict[str, tuple[Callable[[int, float], Point], Sequence[int], Sequence[Axes]]] = {
    "workers": (
        workers,
        WORKERS,
        (("worker processes", "frames per second", ("frames/s",)), ("worker processes", "memory, MB", ("MB",))),
    ),
    "environments": (environments, (8, 32, 128, 512), (("environments of one worker", "memory, MB", ()),)),
    "batch": (batch, tuple(4**n for n in range(3, 9)), (("frames per batch", "frames per second", ()),)),
    "observation": (
        observation,
        OBSERVATIONS,
        (("bytes of an observation", "frames per second", ("frames/s",)),),
    ),
    "publish": (publish, MODELS, (("bytes of the model", "publish to acting, ms", ()),)),
    "head": (
        head,
        tuple(_VECTOR_ENVS * _VECTOR_STEPS * size for size in OBSERVATIONS),
        (("bytes of a batch", "processor time of the head, ms per batch", ("ms",)),),
    ),
}


def measure(name: str, *, quick: bool) -> dict[str, Any]:
    """Points of a curve by size; one that fails says why."""
    found: dict[str, Any] = {}
    sizes = CURVES[name][1]
    for size in sizes[:2] if quick else sizes:
        command = [sys.executable, "-m", "benchmarks.cost", "--point", name, str(size), "--seconds"]
        command.append("0.3" if quick else str(_SECONDS))
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            found[str(size)] = json.loads(lines[-1]) if lines else {"failure": done.stderr.strip()[-300:]}
        except subprocess.TimeoutExpired:
            found[str(size)] = {"failure": f"no answer within {_LIMIT_S:.0f} s"}
        said = "  ".join(
            f"{key} {value:,.1f}" if isinstance(value, float) else f"{key}: {value}"
            for key, value in found[str(size)].items()
        )
        print(f"{name:12} {size:>12,}  {said}  ({time.monotonic() - began:.0f} s)", flush=True)
    return found


# -- plots -----------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 300, 70, 150, 14, 44
_COLORS = ("ours", "second", "other")
_LINES = """
.axis { stroke: #57606a } .grid { stroke: #9aa5b1; stroke-opacity: .35 } polyline { stroke-width: 2 }
polyline.ours { fill: none; stroke: #00796b } polyline.second { fill: none; stroke: #c77700 }
polyline.other { fill: none; stroke: #9aa5b1 }
.second { fill: #c77700 }
"""


def draw(points: dict[str, Point], axes: Axes, *, is_log: bool = True) -> str:
    return "\n".join(_plot(points, axes, is_log)) + "\n"


def _plot(points: dict[str, Point], axes: Axes, is_log: bool) -> Iterator[str]:
    """Where both axes are logarithmic, a line at 45 degrees is a cost in proportion."""
    x_name, y_name, wanted = axes
    series: dict[str, list[tuple[float, float]]] = {}
    for size, point in points.items():
        for name, value in point.items():
            if name in (wanted or point) and name != "failure":
                series.setdefault(name, []).append((float(size), value))
    flat = [pair for pairs in series.values() for pair in pairs]
    x_ticks, y_ticks = ((_decades if is_log else _steps)([pair[axis] for pair in flat]) for axis in (0, 1))

    def place(value: float, ticks: Sequence[float]) -> float:
        low, at, high = map(math.log10 if is_log else float, (ticks[0], value, ticks[-1]))
        return (at - low) / (high - low)

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * place(value, x_ticks)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * place(value, y_ticks)

    left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" aria-label="{escape(y_name)} over {escape(x_name)}">'
    )
    yield f"<style>{STYLE}{_LINES}</style>"
    for tick in x_ticks:
        at = f"{x(tick):.1f}"
        yield f'<line x1="{at}" y1="{_TOP}" x2="{at}" y2="{bottom}" class="grid"/>'
        yield f'<text x="{at}" y="{bottom + 16}" text-anchor="middle" class="small">{_short(tick)}</text>'
    for tick in y_ticks:
        at = f"{y(tick):.1f}"
        yield f'<line x1="{left}" y1="{at}" x2="{right}" y2="{at}" class="grid"/>'
        yield f'<text x="{left - 6}" y="{at}" dy="4" text-anchor="end" class="small">{_short(tick)}</text>'
    yield f'<line x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}" class="axis"/>'
    yield f'<line x1="{left}" y1="{_TOP}" x2="{left}" y2="{bottom}" class="axis"/>'
    middle = (left + right) // 2
    yield f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>'
    yield (
        f'<text transform="translate(12 {(bottom + _TOP) // 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_name)}</text>"
    )
    for color, (name, pairs) in zip(_COLORS, series.items(), strict=False):
        drawn = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in pairs)
        yield f'<polyline points="{drawn}" class="{color}"/>'
        for a, b in pairs:
            yield f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" class="{color}"><title>{b:,.4g}</title></circle>'
        if len(series) > 1:
            a, b = pairs[-1]
            yield f'<text x="{x(a) + 8:.1f}" y="{y(b) + 4:.1f}" class="small">{escape(name)}</text>'
    yield "</svg>"


def _decades(values: Sequence[float]) -> list[float]:
    low = math.floor(math.log10(min(values)))
    return [10.0**power for power in range(low, max(low + 1, math.ceil(math.log10(max(values)))) + 1)]


def _steps(values: Sequence[float]) -> list[float]:
    """At most ten equal steps from 0."""
    step = 10 ** math.floor(math.log10(max(values))) / 5
    step *= 1 if max(values) <= 10 * step else 5
    return [round(step * number, 9) for number in range(math.ceil(max(values) / step) + 1)]


def _short(value: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def draw_all(curves: dict[str, dict[str, Point]], folder: Path) -> None:
    for name, points in curves.items():
        for number, axes in enumerate(CURVES[name][2], start=1):
            if any("failure" not in point for point in points.values()):
                (folder / f"cost-{name}{f'-{number}' if number > 1 else ''}.svg").write_text(draw(points, axes))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two points a curve: does it run?")
    parser.add_argument("--only", action="append", choices=CURVES, metavar="NAME", help=f"of {', '.join(CURVES)}")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "cost.json")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=_SECONDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        torch.set_num_threads(1)
        print(json.dumps(CURVES[given.point[0]][0](int(given.point[1]), given.seconds)), flush=True)
        return
    given.json.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(given.json.read_text()) if given.json.exists() else {"curves": {}}
    if not given.draw:
        results["machine"] = machine()
        for name in given.only or CURVES:
            results["curves"][name] = measure(name, quick=given.quick)
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    draw_all(results["curves"], given.json.parent if given.quick else IMAGE.parent)


if __name__ == "__main__":
    main()
