"""From samples to ratios, a table and JSON."""

import importlib.metadata
import os
import platform
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import BARE
from benchmarks.runner import Outcome
from benchmarks.workloads import num_cores


def ratios(outcome: Outcome, bare: Outcome) -> list[float]:
    """Frames per second over those of the bare loop in the same round."""
    return [
        mine.frames_per_second / theirs.frames_per_second
        for mine, theirs in zip(outcome.samples, bare.samples, strict=False)
    ]


def workload_to_json(outcomes: dict[str, Outcome]) -> dict[str, dict]:
    bare = outcomes[BARE.name]
    return {name: _contender_to_json(outcome, bare) for name, outcome in outcomes.items()}


def _contender_to_json(outcome: Outcome, bare: Outcome) -> dict:
    if not outcome.samples or outcome.failure:
        return {"failure": outcome.failure}
    shares = ratios(outcome, bare)
    return {
        "frames_per_second": median(sample.frames_per_second for sample in outcome.samples),
        "ratio": median(shares) if shares else None,
        "ratios": shares,
        "rounds": [{"frames": sample.frames, "seconds": sample.seconds} for sample in outcome.samples],
    }


def print_workload(console: Console, name: str, results: dict[str, dict]) -> None:
    table = Table(title=name, title_justify="left", title_style="bold")
    table.add_column("", min_width=22)
    for column in ("frames/s", "x bare loop", "lowest", "highest"):
        table.add_column(column, justify="right")
    for contender, result in results.items():
        if "failure" in result:
            table.add_row(contender, f"[red]none[/]: {result['failure']}", "", "", "")
            continue
        shares = result["ratios"]
        cells = [f"{value:.2f}" for value in (result["ratio"], min(shares), max(shares))] if shares else ["", "", ""]
        table.add_row(contender, f"{result['frames_per_second']:,.0f}", *cells)
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
