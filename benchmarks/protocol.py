"""How a contender is driven: it is built and warmed up once, then measures when told to.

    parent                          contender
      | starts it                      |
      |            {"ready": true, ...} <- built and warm
      | "2.5\n"                      ->  measure for 2.5 s
      |   {"frames": n, "seconds": s, "cpu_seconds": c} <-
      | closes stdin                 ->  close, exit

By hand, without `--serve`, a contender measures once and prints the one line with frames and seconds.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch

from benchmarks.workloads import WORKLOADS, Workload

SETTLE_S = 0.3
MIN_TAKES = 2
"""A window has at least so many, so that where it ends matters little."""

Take = Callable[[], int]
"""Waits for the next piece of experience and returns its number of valid frames. Where several workers fill batches
on their own, one take is one batch from each of them, so that a window never ends between two workers."""

Opener = Callable[[Workload, argparse.Namespace], AbstractContextManager[Take]]


def measure(take: Take, seconds: float, *, settle_takes: int = 1) -> dict[str, float]:
    """Take for at least `seconds`, after what was prepared before has been thrown away."""
    settled = time.perf_counter() + SETTLE_S
    takes = 0
    while takes < settle_takes or time.perf_counter() < settled:
        take()
        takes += 1
    frames = takes = 0
    cpu_before, start = cpu_seconds(), time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or takes < MIN_TAKES:
        frames += take()
        takes += 1
    return {"frames": frames, "seconds": elapsed, "cpu_seconds": cpu_seconds() - cpu_before}


def cpu_seconds() -> float:
    """User and system time of this process (to the microsecond) and of its descendants (to 10 ms)."""
    return time.process_time() + sum(_ticks(pid) for pid in _descendants(os.getpid())) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)


def _ticks(pid: int) -> int:
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return int(user) + int(system)
    return 0


def main(open_contender: Opener, arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None) -> None:
    """Run a contender's script: parse, build, warm up, measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, default="cartpole-64")
    parser.add_argument("--seconds", type=float, default=3.0, help="measure at least so long")
    parser.add_argument("--warmup", type=float, default=1.0, help="run so long before the first measurement")
    parser.add_argument("--settle-takes", type=int, default=1, help="takes to throw away before each measurement")
    parser.add_argument("--serve", action="store_true", help="measure for each number that comes on stdin")
    arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with open_contender(WORKLOADS[args.workload], args) as take:
        measure(take, args.warmup)
        if not args.serve:
            _say(measure(take, args.seconds, settle_takes=args.settle_takes))
            return
        _say({"ready": True})
        for line in sys.stdin:
            _say(measure(take, float(line), settle_takes=args.settle_takes))


def _say(message: dict[str, float]) -> None:
    print(json.dumps(message), flush=True)
