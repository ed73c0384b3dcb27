"""A small HTTP server for texts that are made at each request: metrics and probes. Light: imports no torch."""

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

_IDLE_S = 5.0
PLAIN = "text/plain; charset=utf-8"
Answer = tuple[HTTPStatus, bytes, str]
"""Status, body, content type."""


class TextServer:
    """Answers GET in threads of its own."""

    def __init__(self, answer: Callable[[str, str], Answer], *, host: str, port: int) -> None:
        """Listen on an IPv4 or IPv6 address. `answer` gets the path with its query, and the Accept header; `port`: 0:
        any free one, which the attribute says. Raises OSError where the port is taken.
        """

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in host else AF_INET
            daemon_threads = True

        class Handler(BaseHTTPRequestHandler):
            timeout = _IDLE_S

            def do_GET(self) -> None:  # the base class's name
                status, body, content_type = answer(self.path, self.headers.get("Accept", ""))
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
                """Nothing: requests come every few seconds."""

        self._server = Server((host, port), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="text-server", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
