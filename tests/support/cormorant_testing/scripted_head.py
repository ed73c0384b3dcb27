"""A listener that answers as it is told, on a real socket: what a client sees of a head in trouble."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from cormorant_contract.rest.problems import TYPE_PREFIX


@dataclass(frozen=True)
class Say:
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    breaks: bool = False
    """Close the connection instead of answering."""
    early: bool = False
    """Answer before the request's body was read."""


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


class Heard:
    """One request. Its body is read when it is asked for, at the latest before the answer is sent."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self.method, self.path = handler.command, handler.path
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        self._file = handler.rfile

    @cached_property
    def body(self) -> bytes:
        return self._file.read(int(self.headers.get("content-length", 0)))


class ScriptedHead:
    """Answers by a function of the request; remembers what it heard."""

    def __init__(self, answer: Callable[[Heard], Say]) -> None:
        self.heard: list[Heard] = []
        head = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                heard = Heard(self)
                said = answer(heard)
                heard.body = b"" if said.early else heard.body
                head.heard.append(heard)
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
                self.close_connection = said.early or self.close_connection

            do_GET = do_PATCH = do_PUT = do_POST = do_DELETE = _any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

            def finish(self) -> None:
                with suppress(OSError, ValueError):
                    super().finish()

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_turn(*answers: Say) -> Callable[[Heard], Say]:
    """One after another, the last for ever."""
    left = list(answers)
    return lambda _heard: left.pop(0) if len(left) > 1 else left[0]
