"""`/livez`, `/readyz` and `/metrics` of a worker's pod. Liveness is about the supervisor alone: a pod without a
head is alive and waits.
"""

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

from cormorant_worker.supervisor.metrics import PodMetrics
from cormorant_worker.supervisor.pod_state import PodState

_IDLE_S = 5.0
_PLAIN = "text/plain; charset=utf-8"


class PodProbes:
    """A small HTTP server in a thread of its own."""

    def __init__(self, state: PodState, metrics: PodMetrics, *, pod_ip: str, port: int) -> None:
        """Listen.

        Args:
            pod_ip: the pod's address; tells which family of addresses the cluster uses.
            port: 0: any free one.

        Raises:
            OSError: the port is taken.
        """

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in pod_ip else AF_INET
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
                """Nothing: probes come every two seconds."""

        self._server = Server(("::" if ":" in pod_ip else "0.0.0.0", port), Handler)  # the kubelet asks
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(path: str, state: PodState, metrics: PodMetrics, accept: str = "") -> tuple[HTTPStatus, bytes, str]:
    """What to answer to a GET: status, body, content type."""
    match path.partition("?")[0]:
        case "/livez":
            return _verdict(state.is_live, "the supervisor has not looked around for a minute")
        case "/readyz":
            why = "leaving" if state.is_leaving else "Ray has not joined the head"
            return _verdict(state.is_joined and not state.is_leaving, why)
        case "/metrics":
            return HTTPStatus.OK, *metrics.text(accept)
        case _:
            return HTTPStatus.NOT_FOUND, b"there are /livez, /readyz and /metrics\n", _PLAIN


def _verdict(is_good: bool, why_not: str) -> tuple[HTTPStatus, bytes, str]:
    if is_good:
        return HTTPStatus.OK, b"ok\n", _PLAIN
    return HTTPStatus.SERVICE_UNAVAILABLE, f"{why_not}\n".encode(), _PLAIN
