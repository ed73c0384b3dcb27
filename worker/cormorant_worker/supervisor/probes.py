"""Endpoints of a worker's pod for the kubelet and Prometheus: `/livez`, `/readyz` and `/metrics`. Liveness concerns
only the supervisor: a pod that waits for a head is alive.

Imports only the metrics of the contract, which do not need pydantic.
"""

import threading
import time
from dataclasses import dataclass, field
from functools import cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any, Self

from cormorant_contract.metrics import worker as declared
from cormorant_contract.metrics.labels import CONTENT_TYPE
from cormorant_worker.metrics.exposition import Exposition
from cormorant_worker.supervisor.settings import SupervisorRefused

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
    """One pod's metrics, read when it is scraped."""

    def __init__(self, state: PodState, *, job: str, group: str) -> None:
        self._state, self._group = state, group
        self._exposition = Exposition(declared.WORKER_METRICS, collectorjob=job)

    def text(self) -> bytes:
        show = partial(self._exposition.show, group=self._group)
        show(declared.JOINED, self._state.is_joined)
        show(declared.JOINS, self._state.joins)
        library, devices = _driver()
        for index, device in enumerate(devices):
            try:
                rates, memory = library.nvmlDeviceGetUtilizationRates(device), library.nvmlDeviceGetMemoryInfo(device)
            except library.NVMLError:
                continue  # a device that is partitioned does not tell
            show(declared.GPU_UTILIZATION, rates.gpu / 100, gpu=str(index))
            show(declared.GPU_MEMORY, int(memory.used), gpu=str(index))
        return self._exposition.text()


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
                status, body, content_type = answer(self.path, state, metrics)
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


def answer(target: str, state: PodState, metrics: PodMetrics) -> Answer:
    """Answer a request. `/readyz?wait=SECONDS` waits that long for the pod's first membership."""
    path, _, query = target.partition("?")
    wait = query.removeprefix("wait=")
    deadline = time.monotonic() + (min(int(wait), _HUNG_S) if wait.isdecimal() else 0.0)
    while not (state.joins or state.is_leaving) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    why_not = ""
    match path:
        case "/livez":
            if time.monotonic() - state.ticked >= _HUNG_S:
                why_not = "the supervisor has not looked around for a minute"
        case "/readyz":
            if state.is_leaving or not state.is_joined:
                why_not = "leaving" if state.is_leaving else "Ray has not joined the head"
        case "/metrics":
            return HTTPStatus.OK, metrics.text(), CONTENT_TYPE
        case _:
            return HTTPStatus.NOT_FOUND, b"there are /livez, /readyz and /metrics\n", _PLAIN
    return HTTPStatus.SERVICE_UNAVAILABLE if why_not else HTTPStatus.OK, f"{why_not or 'ok'}\n".encode(), _PLAIN


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
