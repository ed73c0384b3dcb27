"""How many workers one head holds: `make bench-head`.

Instant workers behind the engines' seam, so that only the head's own work is measured, and real processes of an
environment that does nothing. A learner takes every batch; status is asked for ten times a second over HTTP; weights
are published once a second.
"""

import argparse
import http.client
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from benchmarks.head.instant import InstantEngine
from cormorant_api.http.tokens import Role
from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet import fleet
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.turn.loop import FleetLoop
from cormorant_worker.launch import load_job

_SECONDS = 12.0
_NULL = "benchmarks.head.null_env:NullEnv"


class TimedLoop(FleetLoop):
    """Notes how long it holds the condition, turn by turn."""

    def __init__(self, *args: Any) -> None:
        self.turns_ms: list[tuple[float, float]] = []
        """By the clock, and of a processor."""
        super().__init__(*args)

    def _turn(self) -> bool:
        began, used = time.perf_counter(), time.thread_time()
        has_more = super()._turn()
        self.turns_ms.append(((time.perf_counter() - began) * 1e3, (time.thread_time() - used) * 1e3))
        return has_more


fleet.FleetLoop = TimedLoop  # type: ignore[misc]  # of all fleets of this process


class TimedFleet(WorkerFleet):
    _loop: TimedLoop

    @property
    def turns_ms(self) -> list[tuple[float, float]]:
        return self._loop.turns_ms


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size of one kind."""

    kind: str
    workers: int
    start_s: float
    batches_per_s: float
    turn_p50_ms: float
    turn_p99_ms: float
    turn_cpu_p99_ms: float
    """CPU time: other load on the machine is not in it."""
    status_p50_ms: float
    status_p99_ms: float
    receipts_s: float
    """The slowest publish, until every worker had acknowledged it."""
    memory_mb: int
    """Resident, of the head's process alone."""
    descriptors: int
    """Open descriptors of the head."""


def make_job(workers: int, *, entrypoint: str = "") -> Any:
    env = {"entrypoint": entrypoint or _NULL, "vectorization": "inline", "numEnvs": 1}
    return load_job(
        {
            "apiVersion": "cormorant.dev/v1alpha1",
            "kind": "CollectorJob",
            "metadata": {"name": "capacity"},
            "spec": {
                "env": {"gymnasium": env},
                "policy": {"entrypoint": "benchmarks.head.null_env:make_policy"},
                "collection": {"framesPerBatch": 1 if not entrypoint else 10},
                "output": {"queue": {"capacityBatches": 64}},
                "replicas": workers,
            },
        }
    )


@contextmanager
def serving(kind: str, workers: int) -> Iterator[tuple[HeadServer, TimedFleet, float]]:
    job = make_job(workers, entrypoint=_NULL if kind == "processes" else "")
    with tempfile.TemporaryDirectory() as folder:
        settings = HeadSettings(port=0, directory=Path(folder), linger_s=0.2)
        with HeadServer(job, settings) as server:
            began = time.monotonic()
            engine = InstantEngine() if kind == "instant" else None
            options = FleetOptions(workers=workers, startup_timeout_s=1200.0, drain_timeout_s=60.0)
            fleet = server.start_fleet(options, engine=engine, make=TimedFleet)
            yield server, fleet, time.monotonic() - began


def measure(kind: str, workers: int, seconds: float) -> Row:
    with serving(kind, workers) as (server, fleet, start_s), taking(fleet) as taken:
        port = int(server.url.rpartition(":")[2])
        token = server.head.tokens.by_role.get(Role.READ, "")
        time.sleep(2.0)  # the first tickets
        fleet.turns_ms.clear()
        began, before = time.monotonic(), taken[0]
        status_ms: list[float] = []
        receipts_s: list[float] = []
        publishing = threading.Thread(target=publish, args=(fleet, began + seconds, receipts_s))
        publishing.start()
        while time.monotonic() < began + seconds:
            asked = time.perf_counter()
            ask(port, token)
            status_ms.append((time.perf_counter() - asked) * 1e3)
            time.sleep(0.1)
        batches = (taken[0] - before) / (time.monotonic() - began)
        publishing.join()
        turns, used = zip(*fleet.turns_ms, strict=True)
        return Row(
            kind=kind,
            workers=workers,
            start_s=round(start_s, 1),
            batches_per_s=round(batches),
            turn_p50_ms=round(float(np.percentile(turns, 50)), 2),
            turn_p99_ms=round(float(np.percentile(turns, 99)), 2),
            turn_cpu_p99_ms=round(float(np.percentile(used, 99)), 2),
            status_p50_ms=round(float(np.percentile(status_ms, 50)), 1),
            status_p99_ms=round(float(np.percentile(status_ms, 99)), 1),
            receipts_s=round(max(receipts_s), 2),
            memory_mb=resident_mb(),
            descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        )


@contextmanager
def taking(fleet: WorkerFleet) -> Iterator[list[int]]:
    """A learner that takes what there is."""
    taken, over = [0], threading.Event()

    def take() -> None:
        while not over.is_set():
            try:
                loan = fleet.borrow(timeout_s=1.0)
            except CormorantError:
                continue
            if loan is not None:
                loan.release()
                taken[0] += 1

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join(10)


def publish(fleet: WorkerFleet, until: float, receipts_s: list[float]) -> None:
    while time.monotonic() < until or not receipts_s:
        began = time.monotonic()
        receipt = fleet.publish({"weight": torch.zeros(64, 64)}, wait_s=60.0)
        receipts_s.append(time.monotonic() - began if not receipt.waiting else 60.0)
        time.sleep(1.0)


def ask(port: int, token: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/v1/status", headers={"Authorization": f"Bearer {token}"})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"status answered {response.status}: {body[:200]!r}")


def resident_mb() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20


def in_a_process(kind: str, workers: int, seconds: float) -> Row | None:
    """Memory and descriptors of one size must not hold those of another."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            structlog.configure(processors=[_silent])
            os.write(write, json.dumps(asdict(measure(kind, workers, seconds))).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return Row(**json.loads(text)) if text else None


def _silent(_: object, __: str, ___: Any) -> str:
    raise structlog.DropEvent


def table(rows: Sequence[Row]) -> str:
    heads = (
        "workers", "start s", "batches/s", "turn p50 ms", "turn p99 ms", "of a CPU", "status p50 ms", "status p99 ms",
        "receipts s", "memory MB", "open files",
    )  # fmt: skip
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(heads)]
    for row in rows:
        kind, *numbers = asdict(row).values()
        lines.append(f"| {kind} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str], say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 3000, 5000], help="instant workers")
    parser.add_argument("--processes", type=int, nargs="*", default=[300], help="real processes")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="to measure each size for")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for kind, sizes in (("instant", given.sizes), ("processes", given.processes)):
        for workers in sizes:
            row = in_a_process(kind, workers, given.seconds)
            if row is None:
                say(f"{kind}, {workers}: it did not end well; its words are above")
                continue
            rows.append(row)
    say(f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} processors\n")
    say(table(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
