"""A listener that answers as it is told, on a real socket: what a client sees of a head in trouble."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cormorant_contract.rest.problems import TYPE_PREFIX


@dataclass(frozen=True)
class Say:
    """One answer."""

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


@dataclass
class Heard:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class ScriptedHead:
    """Answers by a function of the request; remembers what it heard."""

    def __init__(self, answer: Callable[[Heard], Say]) -> None:
        self.heard: list[Heard] = []
        head = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                heard = Heard(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, b"")
                said = answer(heard)
                if not said.early:
                    heard.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                    said = answer(heard) if said.status == 0 else said
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


@contextmanager
def scripted(answer: Callable[[Heard], Say]) -> Iterator[ScriptedHead]:
    head = ScriptedHead(answer)
    try:
        yield head
    finally:
        head.close()


def in_turn(*answers: Say) -> Callable[[Heard], Say]:
    """One after another, the last for ever."""
    left = list(answers)
    return lambda _heard: left.pop(0) if len(left) > 1 else left[0]
