"""Every head of a namespace, played by one small server: what an operator asks is answered, what it orders is kept."""

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StubHead:
    """What one head says, and was told."""

    frames: int = 0
    sizes: dict[str, int] = field(default_factory=lambda: {"cpu": 1})
    empty_slots: dict[str, list[int]] = field(default_factory=dict)
    paused: bool = False
    phase: str = "Running"
    tokens: set[str] = field(default_factory=set)
    """Authorization headers that were sent."""


class StubHeads:
    """Use as a context manager; `url` goes into the operator's --head-url."""

    def __init__(self) -> None:
        self.by_job: dict[str, StubHead] = {}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                return

            def _answer(self) -> None:
                job, _, path = self.path.lstrip("/").partition("/")
                head = stub.by_job.setdefault(job, StubHead())
                head.tokens.add(self.headers.get("Authorization", ""))
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                document = _respond(head, job, self.command, f"/{path}", json.loads(body) if body else {})
                content = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = _answer  # noqa: N815 - the base class's names

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{{job}}"

    def __enter__(self) -> "StubHeads":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _respond(head: StubHead, job: str, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/v1/desired":
        if method == "PUT":
            head.sizes = {**head.sizes, **body.get("groups", {})}
            head.empty_slots = body.get("empty_slots", {})
            head.paused = body["paused"] if body.get("paused") is not None else head.paused
        return {"groups": head.sizes, "paused": head.paused, "pending": False, "empty_slots": head.empty_slots}
    if path == "/v1/drain":
        head.phase = "Draining"
        return {"draining": True, "waiting_batches": 0, "lent_batches": 0, "ended": False}
    return {
        "job": job,
        "namespace": "any",
        "epoch": "e",
        "phase": head.phase,
        "conditions": [],
        "frames": {
            "collected": head.frames,
            "settled": head.frames,
            "target": None,
            "per_second": 10.0,
            "stepped": head.frames,
            "delivered": 0,
            "dropped": {},
        },
        "episodes": {"count": 0, "mean_return": None, "mean_length": None},
        "weights": {"version": 0, "min_applied_version": 0},
        "groups": [],
        "restarts": 0,
        "pause_state": "paused" if head.paused else "running",
        "pauses": [],
        "queue": {
            "capacity": 16,
            "waiting": 0,
            "ready": 0,
            "lent": 0,
            "acked": 0,
            "redelivered": 0,
            "ended": False,
        },
        "consumers": [],
        "data_port": 0,
        "listeners": 0,
        "listeners_dropped": 0,
        "started_at": "2026-01-01T00:00:00Z",
    }
