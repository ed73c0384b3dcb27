"""`/metrics` of a fleet that has no head: `cormorant run --metrics-port`."""

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cormorant_contract.metrics.head import FLEET_METRICS
from cormorant_worker.fleet.fleet import Fleet
from cormorant_worker.metrics.exposition import Exposition
from cormorant_worker.metrics.fleet import FleetMetrics

_IDLE_S = 5.0


class MetricsServer:
    """A small HTTP server on loopback, in threads of its own. Use as a context manager."""

    def __init__(self, fleet: Fleet, *, port: int) -> None:
        """Listen.

        Args:
            fleet: read at each scrape; its events are counted in between.
            port: 0: any free one.

        Raises:
            OSError: the port is taken.
        """
        exposition = Exposition(FLEET_METRICS, collectorjob=fleet.job.metadata.name)
        metrics = FleetMetrics(fleet.job, exposition, floor_frames=fleet.stats().frames)

        class Handler(BaseHTTPRequestHandler):
            timeout = _IDLE_S

            def do_GET(self) -> None:  # the base class's name
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(HTTPStatus.NOT_FOUND, "there is /metrics")
                    return
                metrics.sample(fleet.stats())
                body, content_type = exposition.text(self.headers.get("Accept", ""))
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
                """Nothing: scrapes come every few seconds."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._unsubscribe = fleet.subscribe(metrics.hear)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving and unsubscribe from the fleet."""
        self._unsubscribe()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
