"""`/livez`, `/readyz` and `/metrics` of a worker's pod. Liveness is about the supervisor alone: a pod without a
head is alive and waits.
"""

from http import HTTPStatus

from cormorant_worker.metrics.text_server import PLAIN, Answer, TextServer
from cormorant_worker.supervisor.metrics import PodMetrics
from cormorant_worker.supervisor.pod_state import PodState


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
