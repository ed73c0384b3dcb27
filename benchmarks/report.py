"""From samples to ratios, a table and JSON."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import BARE, ENVS_ALONE, POLICY_ALONE
from benchmarks.runner import Outcome
from benchmarks.workloads import num_cores


def ratios(outcome: Outcome, yardstick: Sequence[float]) -> list[float]:
    """Frames per second over those of a yardstick in the same round."""
    return [mine.frames_per_second / theirs for mine, theirs in zip(outcome.samples, yardstick, strict=False)]


def speeds(outcome: Outcome) -> list[float]:
    return [sample.frames_per_second for sample in outcome.samples]


def limits(outcomes: Mapping[str, Outcome]) -> list[float]:
    """Frames per second, by round, that all cores could make if they did nothing but step EnvPool and call the policy:
    cores / (CPU seconds of EnvPool a frame + CPU seconds of the policy a frame).
    """
    parts = [outcomes[part.name].samples for part in (ENVS_ALONE, POLICY_ALONE) if part.name in outcomes]
    # With random actions, the bare loop is EnvPool alone.
    costs = [[sample.cpu_seconds / sample.frames for sample in part] for part in parts or [outcomes[BARE.name].samples]]
    return [num_cores() / sum(cost) for cost in zip(*costs, strict=False)]


def workload_to_json(outcomes: Mapping[str, Outcome]) -> dict[str, dict]:
    bare, limit = speeds(outcomes[BARE.name]), limits(outcomes)
    envs = speeds(outcomes.get(ENVS_ALONE.name, outcomes[BARE.name]))
    return {name: _contender_to_json(outcome, bare, limit=limit, envs=envs) for name, outcome in outcomes.items()}


def _contender_to_json(
    outcome: Outcome, bare: Sequence[float], *, limit: Sequence[float], envs: Sequence[float]
) -> dict:
    if not outcome.samples or outcome.failure:
        return {"failure": outcome.failure}
    shares = ratios(outcome, bare)
    return {
        "frames_per_second": median(speeds(outcome)),
        "ratio": _median(shares),
        "ratios": shares,
        "limit_ratio": _median(ratios(outcome, limit)),
        "envpool_ratio": _median(ratios(outcome, envs)),
        "cpu_microseconds_per_frame": 1e6 * median(sample.cpu_seconds / sample.frames for sample in outcome.samples),
        "limit_frames_per_second": _median(limit),
        "rounds": [asdict(sample) for sample in outcome.samples],
    }


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def print_workload(console: Console, name: str, results: dict[str, dict]) -> None:
    limit = next((result.get("limit_frames_per_second") for result in results.values()), None)
    title = f"{name}: CPU limit {limit:,.0f} frames/s" if limit else name
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("", min_width=22)
    for column in ("frames/s", "x bare loop", "lowest", "highest", "x limit", "x EnvPool", "CPU us/frame"):
        table.add_column(column, justify="right")
    for contender, result in results.items():
        if "failure" in result:
            table.add_row(contender, f"[red]none[/]: {result['failure']}")
            continue
        shares = result["ratios"] or [None]
        found = (result["ratio"], min(shares), max(shares), result["limit_ratio"], result["envpool_ratio"])
        cells = ["" if value is None else f"{value:.2f}" for value in found]
        cpu = f"{result['cpu_microseconds_per_frame']:.2f}"
        table.add_row(contender, f"{result['frames_per_second']:,.0f}", *cells, cpu)
    console.print(table)


def print_micro(console: Console, results: dict[str, dict]) -> None:
    table = Table(title="micro-benchmarks", title_justify="left", title_style="bold")
    for column in ("what", "measured", "unit", "bar", ""):
        table.add_column(column, justify="right" if column in ("measured", "bar") else "left")
    for name, result in results.items():
        if "failure" in result:
            table.add_row(name, "[red]none[/]", "", "", result["failure"])
        for row in result.get("rows", ()):
            table.add_row(row["what"], f"{row['value']:.3g}", row["unit"], row["bar"], row["note"])
    console.print(table)


def machine() -> dict:
    """What a reader needs to judge the numbers; nothing that names the machine."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    packages = ("torch", "tensordict", "numpy", "gymnasium", "envpool")
    return {
        "cpu": cpu,
        "cores": num_cores(),
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }
