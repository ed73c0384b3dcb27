"""Endpoints of a worker's pod for the kubelet and Prometheus: `/livez`, `/readyz` and `/metrics`. Liveness concerns
only the supervisor: a pod that waits for a head is alive.

Imports only the metrics of the contract, which do not need pydantic.
"""

import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path

import psutil

from cormorant_contract.metrics import worker as declared
from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker import heartbeat_layout
from cormorant_worker.heartbeat_layout import FRAMES, TIMING
from cormorant_worker.metrics.exposition import Exposition
from cormorant_worker.metrics.gpus import read_gpus
from cormorant_worker.metrics.text_server import PLAIN, Answer, TextServer

_HUNG_S = 60.0
_LOOK_S = 0.05
_MEMORY_V2 = Path("/sys/fs/cgroup/memory.current")
_MEMORY_V1 = Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")


@dataclass(slots=True, kw_only=True)
class PodState:
    """Written by the supervisor, read by its probes. Single values, each written by one thread: no lock."""

    is_joined: bool = False
    """Ray is a member of the head's cluster."""
    is_leaving: bool = False
    """SIGTERM has come."""
    joins: int = 0
    """How often it has joined a head."""
    ticked: float = field(default_factory=time.monotonic)
    """When the supervisor's loop last ran."""

    def tick(self) -> None:
        self.ticked = time.monotonic()

    @property
    def is_live(self) -> bool:
        """False when the supervisor itself hangs."""
        return time.monotonic() - self.ticked < _HUNG_S


class PodMetrics:
    """One pod's metrics, read when it is scraped. Counters live as long as the supervisor: actors come and go."""

    def __init__(self, state: PodState, *, job: str, group: str, heartbeat_file: Path) -> None:
        self._state, self._group, self._heartbeat_file = state, group, heartbeat_file
        self._exposition = Exposition(declared.WORKER_METRICS, collectorjob=job)
        self._actor = 0
        """Inode of the heartbeat that was read last: each actor makes a file of its own."""
        self._last = (0,) * (1 + len(ACTIVITIES))
        self._totals = [0] * (1 + len(ACTIVITIES))
        self._cpu: dict[int, float] = {}
        self._cpu_s = 0.0

    def text(self, accept: str = "") -> tuple[bytes, str]:
        show = partial(self._exposition.show, group=self._group)
        show(declared.JOINED, self._state.is_joined)
        show(declared.JOINS, self._state.joins)
        self._read_heartbeat()
        frames, *spent = self._totals
        show(declared.FRAMES, frames)
        for activity, spent_ns in zip(ACTIVITIES, spent, strict=True):
            show(declared.PHASE_SECONDS, spent_ns / 1e9, phase=activity)
        show(declared.MEMORY, self._read_processes())
        show(declared.CPU_SECONDS, self._cpu_s)
        for gpu in read_gpus():
            show(declared.GPU_UTILIZATION, gpu.utilization, gpu=gpu.index)
            show(declared.GPU_MEMORY, gpu.used_bytes, gpu=gpu.index)
        return self._exposition.text(accept)

    def _read_heartbeat(self) -> None:
        try:
            with self._heartbeat_file.open("rb") as file:
                actor, numbers = os.fstat(file.fileno()).st_ino, heartbeat_layout.parse(file.read())
        except (OSError, struct.error):
            return  # no actor has begun
        # In a pod that has left the cluster nothing goes on, whatever the last actor wrote.
        until_ns = time.monotonic_ns() if self._state.is_joined else 0
        now = (numbers[FRAMES], *heartbeat_layout.spent_ns(numbers[TIMING:], until_ns=until_ns))
        before = self._last if actor == self._actor else (0,) * len(now)
        self._totals = [t + max(0, a - b) for t, a, b in zip(self._totals, now, before, strict=True)]
        self._actor, self._last = actor, tuple(map(max, now, before))

    def _read_processes(self) -> float:
        resident = 0
        here = psutil.Process()
        for process in (here, *here.children(recursive=True)):
            with suppress(psutil.Error):
                times, resident_here = process.cpu_times(), process.memory_info().rss
                used, before = times.user + times.system, self._cpu.get(process.pid, 0.0)
                # A number that went back is another process's under the same id.
                self._cpu_s += used - before if used >= before else used
                self._cpu[process.pid] = used
                resident += resident_here
        self._cpu = {pid: used for pid, used in self._cpu.items() if psutil.pid_exists(pid)}
        for path in (_MEMORY_V2, _MEMORY_V1):
            with suppress(OSError, ValueError):
                return int(path.read_text()) or resident
        return resident


class PodProbes(TextServer):
    def __init__(self, state: PodState, metrics: PodMetrics, *, pod_ip: str, port: int) -> None:
        """Listen for the kubelet, on the family of addresses of `pod_ip`; see `TextServer`."""
        host = "::" if ":" in pod_ip else "0.0.0.0"
        super().__init__(lambda path, accept: answer(path, state, metrics, accept), host=host, port=port)


def answer(target: str, state: PodState, metrics: PodMetrics, accept: str = "") -> Answer:
    """Answer a request. `/readyz?wait=SECONDS` waits that long for the pod's first membership."""
    path, _, query = target.partition("?")
    wait = query.removeprefix("wait=")
    deadline = time.monotonic() + (min(int(wait), _HUNG_S) if wait.isdecimal() else 0.0)
    while not (state.joins or state.is_leaving) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    match path:
        case "/livez":
            return _verdict(state.is_live, "the supervisor has not looked around for a minute")
        case "/readyz":
            why = "leaving" if state.is_leaving else "Ray has not joined the head"
            return _verdict(state.is_joined and not state.is_leaving, why)
        case "/metrics":
            return HTTPStatus.OK, *metrics.text(accept)
        case _:
            return HTTPStatus.NOT_FOUND, b"there are /livez, /readyz and /metrics\n", PLAIN


def _verdict(is_good: bool, why_not: str) -> Answer:
    if is_good:
        return HTTPStatus.OK, b"ok\n", PLAIN
    return HTTPStatus.SERVICE_UNAVAILABLE, f"{why_not}\n".encode(), PLAIN
