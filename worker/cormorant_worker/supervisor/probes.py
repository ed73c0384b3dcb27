"""Endpoints of a worker's pod for the kubelet and Prometheus: `/livez`, `/readyz` and `/metrics`. Liveness concerns
only the supervisor: a pod that waits for a head is alive.

Imports only the metrics of the contract, which do not need pydantic.
"""

import os
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any, Self

from cormorant_contract.metrics import worker as declared
from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker import heartbeat_layout
from cormorant_worker.errors import SupervisorRefused
from cormorant_worker.heartbeat_layout import FRAMES, TIMING
from cormorant_worker.metrics.exposition import Exposition

_HUNG_S = 60.0
_LOOK_S = 0.05
_IDLE_S = 5.0
_PLAIN = "text/plain; charset=utf-8"
Answer = tuple[HTTPStatus, bytes, str]
"""Status, body, content type."""


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


class PodMetrics:
    """One pod's metrics, read when it is scraped. Counters live as long as the supervisor: actors come and go."""

    def __init__(self, state: PodState, *, job: str, group: str, heartbeat_file: Path) -> None:
        self._state, self._group, self._heartbeat_file = state, group, heartbeat_file
        self._exposition = Exposition(declared.WORKER_METRICS, collectorjob=job)
        self._actor = 0
        """Inode of the heartbeat that was read last: each actor makes a file of its own."""
        self._last = (0,) * (1 + len(ACTIVITIES))
        self._totals = [0] * (1 + len(ACTIVITIES))
        self._reading = threading.Lock()
        """Guards what was read last, and the totals: two scrapes at a time would count a difference twice."""

    def text(self, accept: str = "") -> tuple[bytes, str]:
        show = partial(self._exposition.show, group=self._group)
        show(declared.JOINED, self._state.is_joined)
        show(declared.JOINS, self._state.joins)
        with self._reading, suppress(OSError, struct.error):  # no actor has begun
            with self._heartbeat_file.open("rb") as file:
                actor, numbers = os.fstat(file.fileno()).st_ino, heartbeat_layout.parse(file.read())
            # In a pod that has left the cluster nothing goes on, whatever the last actor wrote.
            until_ns = time.monotonic_ns() if self._state.is_joined else 0
            now = (numbers[FRAMES], *heartbeat_layout.spent_ns(numbers[TIMING:], until_ns=until_ns))
            before = self._last if actor == self._actor else (0,) * len(now)
            self._totals = [t + max(0, a - b) for t, a, b in zip(self._totals, now, before, strict=True)]
            self._actor, self._last = actor, tuple(map(max, now, before))
        frames, *spent = self._totals
        show(declared.FRAMES, frames)
        for activity, spent_ns in zip(ACTIVITIES, spent, strict=True):
            show(declared.PHASE_SECONDS, spent_ns / 1e9, phase=activity)
        library, devices = _driver()
        for index, device in enumerate(devices):
            try:
                rates, memory = library.nvmlDeviceGetUtilizationRates(device), library.nvmlDeviceGetMemoryInfo(device)
            except library.NVMLError:
                continue  # a device that is partitioned does not tell
            show(declared.GPU_UTILIZATION, rates.gpu / 100, gpu=str(index))
            show(declared.GPU_MEMORY, int(memory.used), gpu=str(index))
        return self._exposition.text(accept)


class PodProbes:
    """Answers the kubelet and Prometheus, in threads of its own."""

    def __init__(self, state: PodState, metrics: PodMetrics, *, pod_ip: str, port: int) -> None:
        """Listen on the family of addresses of `pod_ip`. `port`: 0: any free one, which the attribute says. Raises
        SupervisorRefused where the port is taken.
        """
        host = "::" if ":" in pod_ip else "0.0.0.0"

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in host else AF_INET
            daemon_threads = True

        class Handler(BaseHTTPRequestHandler):
            timeout = _IDLE_S

            def do_GET(self) -> None:  # the base class's name
                status, body, content_type = answer(self.path, state, metrics, self.headers.get("Accept", ""))
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
                """Nothing: requests come every few seconds."""

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise SupervisorRefused(f"cannot listen on port {port} for probes: {error}") from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(target: str, state: PodState, metrics: PodMetrics, accept: str = "") -> Answer:
    """Answer a request. `/readyz?wait=SECONDS` waits that long for the pod's first membership."""
    path, _, query = target.partition("?")
    wait = query.removeprefix("wait=")
    deadline = time.monotonic() + (min(int(wait), _HUNG_S) if wait.isdecimal() else 0.0)
    while not (state.joins or state.is_leaving) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    match path:
        case "/livez":
            is_live = time.monotonic() - state.ticked < _HUNG_S
            return _verdict(is_live, "the supervisor has not looked around for a minute")
        case "/readyz":
            why = "leaving" if state.is_leaving else "Ray has not joined the head"
            return _verdict(state.is_joined and not state.is_leaving, why)
        case "/metrics":
            return HTTPStatus.OK, *metrics.text(accept)
        case _:
            return HTTPStatus.NOT_FOUND, b"there are /livez, /readyz and /metrics\n", _PLAIN


def _verdict(is_good: bool, why_not: str) -> Answer:
    if is_good:
        return HTTPStatus.OK, b"ok\n", _PLAIN
    return HTTPStatus.SERVICE_UNAVAILABLE, f"{why_not}\n".encode(), _PLAIN


@cache
def _driver() -> tuple[Any, tuple[Any, ...]]:
    """The driver's library and its devices; none without a driver, or without the library."""
    try:
        import pynvml
    except ImportError:
        return None, ()
    try:
        pynvml.nvmlInit()
        return pynvml, tuple(pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return pynvml, ()
