"""What a micro-benchmark prints."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch


def row(what: str, value: float, unit: str, *, bar: str = "", note: str = "") -> dict:
    """One line of the table. `bar` is what the project wants of it."""
    return {"what": what, "value": value, "unit": unit, "bar": bar, "note": note}


def main(measure: Callable[..., Sequence[dict]]) -> None:
    """Run `measure(quick=...)` and print its rows as one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"rows": list(measure(quick=args.quick))}), flush=True)


def interleaved(
    *jobs: Callable[[], object], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of each job in each round: A B A B ... Every job runs once before the first round.

    Processor time (`clock=time.process_time`) measures the same on a machine that does other things as well.
    """
    seconds: list[list[float]] = [[] for _ in jobs]
    for job in jobs:
        job()
    for _ in range(rounds):
        for times, job in zip(seconds, jobs, strict=True):
            start = clock()
            job()
            times.append(clock() - start)
    return seconds


def median_difference(longer: Sequence[float], shorter: Sequence[float]) -> float:
    """Median over the rounds of what one job took longer than the other."""
    return median(a - b for a, b in zip(longer, shorter, strict=True))


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over the rounds of the ratio of two jobs' times."""
    return median(a / b for a, b in zip(numerator, denominator, strict=True))
