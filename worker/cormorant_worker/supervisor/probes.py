"""What a worker's pod tells the kubelet and Prometheus: `/livez`, `/readyz` and `/metrics`. Liveness is about the
supervisor alone: a pod without a head is alive and waits.

Names and texts of metrics are those of the contract, which is not imported here: a test compares. Light:
prometheus-client alone.
"""

import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from cormorant_worker import heartbeat_layout
from cormorant_worker.heartbeat_layout import FRAMES, TIMING
from cormorant_worker.metrics.gpus import read_gpus
from cormorant_worker.metrics.text_server import PLAIN, Answer, TextServer

_HUNG_S = 60.0
_PREFIX = "cormorant_worker_"
ACTIVITIES = ("env", "inference", "transfer", "weights", "store", "idle", "paused", "build")
_MEMORY_V2 = Path("/sys/fs/cgroup/memory.current")
_MEMORY_V1 = Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")
Family = CounterMetricFamily | GaugeMetricFamily


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


class PodMetrics(Collector):
    """One pod's metrics, read when it is scraped. Counters live as long as the supervisor: actors come and go."""

    def __init__(self, state: PodState, *, job: str, group: str, heartbeat_file: Path) -> None:
        self._state, self._labels, self._heartbeat_file = state, (job, group), heartbeat_file
        self._actor = 0
        """Inode of the heartbeat that was read last: each actor makes a file of its own."""
        self._last = (0,) * (1 + len(ACTIVITIES))
        self._totals = [0] * (1 + len(ACTIVITIES))
        self._cpu: dict[int, float] = {}
        self._cpu_s = 0.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self, accept: str = "") -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Family]:
        state = self._state
        joined, joins = int(state.is_joined), state.joins
        yield self._family("joined", "1 if the pod's Ray node is a member of the head's cluster.", {(): joined})
        yield self._family("joins_total", "Number of times the pod's Ray node joined a head.", {(): joins})
        self._read_heartbeat()
        frames, *spent = self._totals
        yield self._family("frames_total", "Frames stepped by workers in this pod.", {(): frames})
        seconds: dict[tuple[str, ...], float] = {(name,): ns / 1e9 for name, ns in zip(ACTIVITIES, spent, strict=True)}
        yield self._family("phase_seconds_total", "Time of the worker by activity.", seconds, "phase")
        memory = self._read_processes()
        yield self._family("cpu_seconds_total", "CPU time of all processes of the pod.", {(): self._cpu_s})
        words = "Memory used by the pod's cgroup, or by its processes if there is no cgroup."
        yield self._family("memory_used_bytes", words, {(): memory})
        gpus = tuple(read_gpus())
        if gpus:
            rates: dict[tuple[str, ...], float] = {(gpu.index,): gpu.utilization for gpu in gpus}
            used: dict[tuple[str, ...], float] = {(gpu.index,): float(gpu.used_bytes) for gpu in gpus}
            yield self._family("gpu_utilization_ratio", "Fraction of time in which a kernel was running.", rates, "gpu")
            yield self._family("gpu_memory_used_bytes", "Memory in use, of all processes.", used, "gpu")

    def _family(self, name: str, words: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Family:
        make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family: Family = make(_PREFIX + name, words, labels=("collectorjob", "group", *labels))
        for own, value in values.items():
            family.add_metric([*self._labels, *own], value)
        return family

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


def answer(path: str, state: PodState, metrics: PodMetrics, accept: str = "") -> Answer:
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
