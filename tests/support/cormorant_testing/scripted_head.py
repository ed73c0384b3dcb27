"""A listener that answers as it is told, on a real socket: what a client sees of a head in trouble."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cormorant_contract.rest.problems import TYPE_PREFIX

UPDATE = {
    "update_id": "u7", "model": "policy", "models": [], "version": 7, "digest": "xxh3:0", "etag": "", "bytes": 1,
    "tensors": 1, "state": "staged", "workers": {"total": 1, "acked": 0, "failed": 0}, "receipts": [],
    "staged_at": "2026-01-01T00:00:00Z", "timings": {},
}  # fmt: skip


@dataclass(frozen=True)
class Say:
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    breaks: bool = False
    """Close the connection instead of answering."""


def problem(status: int, kind: str, **members: Any) -> Say:
    body = {"type": TYPE_PREFIX + kind, "title": kind, "status": status, **members}
    return Say(status, json.dumps(body).encode(), {"Content-Type": "application/problem+json"})


def job_status(**changes: Any) -> dict[str, Any]:
    """What `GET /v1/status` says of a job that has done nothing, but for what is changed."""
    nothing = {
        "job": "pong", "namespace": "default", "epoch": "e", "phase": "Running", "conditions": [],
        "frames": {"collected": 0, "target": None, "per_second": 0, "stepped": 0, "delivered": 0, "dropped": {}},
        "episodes": {"count": 0, "mean_return": None, "mean_length": None},
        "weights": {"version": 0, "min_applied_version": 0}, "groups": [], "restarts": 0, "pause_state": "running",
        "pauses": [], "consumers": [], "data_port": 0,
        "queue": {
            "capacity": 1, "waiting": 0, "ready": 0, "lent": 0, "acked": 0, "redelivered": 0, "ended": False,
        },
        "started_at": "2026-01-01T00:00:00Z", "desired": {"groups": {}, "paused": False, "pending": False},
    }  # fmt: skip
    return nothing | changes


@dataclass(frozen=True)
class Heard:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "ScriptedHead"

    def _any(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        heard = Heard(self.command, self.path, headers, body)
        said = self.server.answer(heard)
        self.server.heard.append(heard)
        if said.breaks:
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(said.status)
        for name, value in said.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(said.body)))
        self.end_headers()
        self.wfile.write(said.body)

    do_GET = do_PATCH = do_PUT = do_POST = do_DELETE = _any  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


class ScriptedHead(ThreadingHTTPServer):
    """Answers by a function of the request; remembers what it heard."""

    def __init__(self, answer: Callable[[Heard], Say]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.heard: list[Heard] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_: object) -> None:
        pass

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()


def in_turn(*answers: Say) -> Callable[[Heard], Say]:
    """One after another, the last for ever."""
    left = list(answers)
    return lambda _heard: left.pop(0) if len(left) > 1 else left[0]
