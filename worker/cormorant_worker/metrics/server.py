"""`/metrics` of a fleet that has no head: `cormorant run --metrics-port`."""

from http import HTTPStatus

from cormorant_contract.metrics.head import FLEET_METRICS
from cormorant_worker.fleet.fleet import Fleet
from cormorant_worker.metrics.exposition import Exposition
from cormorant_worker.metrics.fleet import FleetMetrics
from cormorant_worker.metrics.text_server import PLAIN, Answer, TextServer


class MetricsServer(TextServer):
    """Serves on loopback. Use as a context manager."""

    def __init__(self, fleet: Fleet, *, port: int) -> None:
        """Listen; the fleet is read at each scrape, and its events are counted in between. See `TextServer`."""
        exposition = Exposition(FLEET_METRICS, collectorjob=fleet.job.metadata.name)
        metrics = FleetMetrics(fleet.job, exposition, floor_frames=fleet.stats().frames)

        def answer(path: str, accept: str) -> Answer:
            if path != "/metrics":
                return HTTPStatus.NOT_FOUND, b"there is /metrics\n", PLAIN
            metrics.sample(fleet.stats())
            return HTTPStatus.OK, *exposition.text(accept)

        super().__init__(answer, host="127.0.0.1", port=port)
        self._unsubscribe = fleet.subscribe(metrics.on_fleet_event)

    def close(self) -> None:
        """Stop serving and unsubscribe from the fleet."""
        self._unsubscribe()
        super().close()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
