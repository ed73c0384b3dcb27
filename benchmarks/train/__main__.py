"""PPO by every library with the same network and constants: `make bench-train`.

    python -m benchmarks.train [--seeds 5] [--only halfcheetah] [--contender cormorant] [--json FILE]

cartpole        until the return is there: seconds, frames and CPU
halfcheetah     a fixed number of frames: seconds, CPU and the return that was reached
pong            the same

Every run is a process of its own; runs are interleaved (all tasks and contenders with seed 1, then all with seed 2,
...) and one runs at a time. Compare ratios of one run only. "Seconds" count from the first frames asked for to the end
of the last update, "from start" and CPU seconds from the start of the process, with imports, workers and Ray. "Updates"
are optimizer steps, as torch counts them, over those that an update has to have. The JSON is written after every run.
"""

import argparse
import json
import math
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
from benchmarks.report import machine
from benchmarks.runner import environment
from benchmarks.train.task import TASKS, Task

_LONGEST_S = 900


@dataclass(slots=True)
class Contender:
    name: str
    module: str
    kind: str = ""
    is_peer: bool = True
    tasks: tuple[str, ...] = tuple(TASKS)
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
    ours, vector_tasks = "cormorant_ppo", ("cartpole", "halfcheetah")
    return [
        Contender("plain EnvPool loop", ours, "loop", is_peer=False),
        Contender("cormorant, one process", ours, "process", is_peer=False),
        Contender("cormorant, 2 workers, on-policy", ours, "on-policy", is_peer=False),
        Contender("cormorant, 2 workers, one version behind", ours, "behind", is_peer=False),
        Contender("Stable-Baselines3, DummyVecEnv", "sb3", "dummy"),
        Contender("Stable-Baselines3, SubprocVecEnv", "sb3", "subproc"),
        Contender("TorchRL, Collector", "torchrl_ppo", "single"),
        Contender("TorchRL, MultiSyncCollector", "torchrl_ppo", "multi_sync"),
        Contender("Tianshou", "tianshou_ppo", tasks=vector_tasks),
        Contender("RLlib, 2 EnvRunners", "rllib_ppo", tasks=vector_tasks),
    ]


_COLUMNS = (
    "contender", "seconds", "from start", "CPU s", "frames", "updates", "return", "reached", "x plain loop", "lowest",
    "highest",
)  # fmt: skip


def table(task: Task, of: list[Contender]) -> Table:
    end = f"a return of {task.goal:g}" if task.goal < math.inf else f"{task.max_frames:,} frames"
    shown = Table(title=f"PPO on {task.task_id} to {end}: medians")
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name == "contender" else "right", no_wrap=name == "contender")
    plain = {run["seed"]: run["seconds"] for contender in of if contender.kind == "loop" for run in contender.runs}
    for contender in of:
        runs = contender.runs
        if not runs:
            shown.add_row(contender.name, "failed" if contender.failure else "-")
            continue
        ratios = [run["seconds"] / plain[run["seed"]] for run in runs if run["seed"] in plain]
        returns = [run["return"] for run in runs if run["return"] is not None]
        shown.add_row(
            contender.name,
            *(f"{median(run[key] for run in runs):.1f}" for key in ("seconds", "started_seconds", "cpu_seconds")),
            f"{median(run['frames'] for run in runs):,.0f}",
            f"{median(run['updates'] for run in runs):.1f}",
            f"{median(returns):.1f}" if returns else "-",
            f"{sum(run['is_reached'] for run in runs)} of {len(runs)}" if task.goal < math.inf else "",
            *(f"{of_all(ratios):.2f}" for of_all in (median, min, max) if ratios),
        )
    return shown


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run in progress ends, too, and tables are printed
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--only", action="append", metavar="NAME", choices=TASKS, help=f"of {', '.join(TASKS)}")
    options.add_argument("--contender", action="append", metavar="TEXT", help="only contenders with TEXT in their name")
    options.add_argument("--max-frames", type=int, default=0, help="a run ends after so many; 0: the task's")
    options.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "train.json")
    chosen = options.parse_args()
    tasks = {
        name: [
            contender
            for contender in contenders()
            if name in contender.tasks
            and any(text.lower() in contender.name.lower() for text in chosen.contender or [""])
        ]
        for name in chosen.only or TASKS
    }
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    results = {"machine": machine()}
    try:
        for seed in range(1, chosen.seeds + 1):
            for name, taking_part in tasks.items():
                for contender in taking_part:
                    measure(contender, name, seed, chosen.max_frames)
                    results["tasks"] = {
                        name: {c.name: {"runs": c.runs, "failure": c.failure} for c in of} for name, of in tasks.items()
                    }
                    chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        for name, taking_part in tasks.items():
            Console(width=max(150, Console().width)).print(table(TASKS[name], taking_part))


def measure(contender: Contender, task: str, seed: int, max_frames: int) -> None:
    """One run, unless the contender cannot."""
    if contender.is_peer and not PEERS_PYTHON.exists():
        contender.failure = "not installed; benchmarks/peers/setup makes .venv-peers"
    if contender.failure:
        return
    before = len(contender.runs)
    contender.run("--task", task, "--seed", str(seed), "--max-frames", str(max_frames))
    start = f"{task:12} seed {seed}  {contender.name:42}"
    if contender.failure:
        print(start, contender.failure, flush=True)
    for run in contender.runs[before:]:
        run["seed"] = seed
        print(
            f"{start} {run['seconds']:6.1f} s  {run['frames']:>8,} frames  "
            f"{run['gradient_steps']:>7,} steps = {run['updates']:6.1f} updates  CPU {run['cpu_seconds']:6.1f} s  "
            f"return {run['return'] or math.nan:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
