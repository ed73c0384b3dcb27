"""Seconds, frames and CPU until PPO's return is there: `make bench-train`.

    python -m benchmarks.train [--seeds 5] [--goal 450] [--only cormorant] [--json FILE]

Every run is a process of its own; runs are interleaved (all contenders with seed 1, then all with seed 2, ...) and one
runs at a time. Compare ratios of one run only. "Seconds" count from the first frames asked for, "from start" and CPU
seconds from the start of the process, with imports, workers and Ray.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import PEERS_PYTHON, ROOT
from benchmarks.runner import environment

_LONGEST_S = 900


@dataclass(slots=True)
class Contender:
    name: str
    module: str
    kind: str = ""
    is_peer: bool = True
    runs: list[dict] = field(default_factory=list)
    failure: str = ""

    def command(self, *arguments: str) -> list[str]:
        python = str(PEERS_PYTHON) if self.is_peer else sys.executable
        kind = ("--kind", self.kind) if self.kind else ()
        return [python, "-W", "ignore", "-m", f"benchmarks.train.{self.module}", *kind, *arguments]

    def run(self, *arguments: str) -> None:
        began = time.perf_counter()
        process = subprocess.Popen(
            self.command(*arguments),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=_LONGEST_S)
            ended_s = time.perf_counter() - began
            results = [json.loads(line) for line in out.splitlines() if line.startswith('{"is_reached"')]
            if not results:
                words = [line.strip() for line in err.splitlines() if line.strip()]
                self.failure = words[-1][-300:] if words else f"it ended with {process.returncode}"
            self.runs += [result | {"started_seconds": ended_s} for result in results]
        except subprocess.TimeoutExpired:
            self.failure = f"it took longer than {_LONGEST_S} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a library left behind
            process.communicate()


def contenders() -> list[Contender]:
    ours = "cormorant_ppo"
    return [
        Contender("plain EnvPool loop", ours, "loop", is_peer=False),
        Contender("cormorant, one process", ours, "process", is_peer=False),
        Contender("cormorant, 2 workers, on-policy", ours, "on-policy", is_peer=False),
        Contender("cormorant, 2 workers, one version behind", ours, "behind", is_peer=False),
        Contender("Stable-Baselines3, DummyVecEnv", "sb3", "dummy"),
        Contender("Stable-Baselines3, SubprocVecEnv", "sb3", "subproc"),
        Contender("TorchRL, Collector", "torchrl_ppo", "single"),
        Contender("TorchRL, MultiSyncCollector", "torchrl_ppo", "multi_sync"),
        Contender("Tianshou", "tianshou_ppo"),
        Contender("RLlib, 2 EnvRunners", "rllib_ppo"),
    ]


def table(of: list[Contender], goal: float) -> Table:
    shown = Table(title=f"PPO on CartPole to a return of {goal:g}: medians")
    for name in (
        "contender",
        "seconds",
        "from start",
        "CPU s",
        "frames",
        "reached",
        "x plain loop",
        "lowest",
        "highest",
    ):
        shown.add_column(name, justify="left" if name == "contender" else "right", no_wrap=name == "contender")
    plain = {run["seed"]: run["seconds"] for contender in of if contender.kind == "loop" for run in contender.runs}
    for contender in of:
        runs = contender.runs
        if not runs:
            shown.add_row(contender.name, contender.failure or "-")
            continue
        ratios = [run["seconds"] / plain[run["seed"]] for run in runs if run["seed"] in plain]
        shown.add_row(
            contender.name,
            *(f"{median(run[key] for run in runs):.1f}" for key in ("seconds", "started_seconds", "cpu_seconds")),
            f"{median(run['frames'] for run in runs):,.0f}",
            f"{sum(run['is_reached'] for run in runs)} of {len(runs)}",
            *(f"{of_all(ratios):.2f}" for of_all in (median, min, max) if ratios),
        )
    return shown


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--goal", type=float, default=450.0)
    options.add_argument("--max-frames", type=int, default=1_000_000, help="a run ends without the goal after so many")
    options.add_argument("--only", action="append", default=[], help="contenders whose name contains this")
    options.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "train.json")
    chosen = options.parse_args()
    chosen_names = [name.lower() for name in chosen.only]
    taking_part = [c for c in contenders() if not chosen_names or any(name in c.name.lower() for name in chosen_names)]
    for contender in taking_part:
        if contender.is_peer and not PEERS_PYTHON.exists():
            contender.failure = "not installed; benchmarks/peers/setup makes .venv-peers"
    arguments = ("--goal", str(chosen.goal), "--max-frames", str(chosen.max_frames))
    for seed in range(1, chosen.seeds + 1):
        for contender in taking_part:
            if contender.failure:
                continue
            before = len(contender.runs)
            contender.run("--seed", str(seed), *arguments)
            for run in contender.runs[before:]:
                run["seed"] = seed
                print(
                    f"seed {seed}  {contender.name:42} {run['seconds']:6.1f} s  {run['frames']:>8,} frames  "
                    f"CPU {run['cpu_seconds']:6.1f} s",
                    flush=True,
                )
    Console(width=max(140, Console().width)).print(table(taking_part, chosen.goal))
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps({c.name: {"runs": c.runs, "failure": c.failure} for c in taking_part}, indent=1))


if __name__ == "__main__":
    main()
