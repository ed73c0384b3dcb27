"""One uvicorn server in a thread of its own, with an event loop of its own and its TLS files.

Its HTTP protocol has limits that uvicorn's lacks: size and duration of a request's head, unsent bytes in this process,
and data that a client keeps sending after the response.
"""

import asyncio
import contextlib
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cormorant_api.errors import ApiError, HeadFault
from cormorant_api.http.bodies import ABORT_KEY, LEAVING_KEY
from cormorant_api.http.problems import answer
from cormorant_api.http.tokens import stamp_of
from cormorant_api.settings import BACKLOG, HeadSettings, bound
from cormorant_contract.rest.base import PROBLEM_JSON
from cormorant_contract.rest.problems import ProblemType

log = structlog.get_logger()

_START_S = 20.0
_KEEP_ALIVE_S = 75
MOST_HEAD_BYTES = 64 * 1024
"""Longer heads are refused, unless one arrives in one piece: an event loop reads 256 KiB at once."""
_HEAD_WITHIN_S = 30.0
_REST_WITHIN_S = 10.0
"""Time for the rest of a body that was refused early. Closing at once would keep the client from reading the
response.
"""


class Listener:
    """Serves an application on one port from `start` to `stop`."""

    def __init__(self, app: Any, settings: HeadSettings, *, port: int, name: str) -> None:
        """Bind the port; 0: any free one. HeadFault if it is not available."""
        self._socket = bound(settings.host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(settings.grace_s)),
            backlog=BACKLOG,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        config.load()
        if config.ssl is not None and settings.tls_cert is not None and settings.tls_key is not None:
            reload_when_renewed(config.ssl, settings.tls_cert, settings.tls_key)
        self._grace_s = settings.grace_s
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise HeadFault(f"the server on port {self.port} did not start; see its log")
            time.sleep(0.005)

    def stop(self) -> None:
        """Accept no new requests and end the open ones within `grace_s`. May be called twice."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(self._grace_s + 3)
            self._server.force_exit = True
            self._thread.join(3)
        self._socket.close()

    def _serve(self) -> None:
        # Cancelled requests raise here, which is not a failure of this thread.
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])


def check_tls(cert: Path, key: Path) -> None:
    """Check that a server can use these files; HeadFault if not. Does not check expiry: clients do."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise HeadFault(f"cannot use {cert} with {key} for TLS: {error}") from error


def reload_when_renewed(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Have a server use a renewed certificate, at the latest from the second connection after the files changed. Files
    that do not match, as during their replacement, leave the earlier certificate in use.
    """
    shown = stamp_of(cert)

    def look(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        nonlocal shown
        stamp = stamp_of(cert)
        if stamp in (shown, ()):
            return
        try:
            check_tls(cert, key)
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError, HeadFault) as error:
            log.warning("certificate_not_renewed", reason=str(error))
        else:
            shown = stamp
            log.info("certificate_renewed", cert=str(cert))

    context.sni_callback = look


class BoundedProtocol(HttpToolsProtocol):
    _head_bytes = 0
    _is_in_head = True
    _is_in_message = False
    _timer: asyncio.TimerHandle | None = None
    """Closes the connection if a request's head, or the rest of a body after the response, takes too long."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        # `send` must not return while the transport still holds a view of a batch (`memory_response`). With TLS
        # it holds a copy, and with a limit of 0 even an empty buffer would block forever.
        is_tls = transport.get_extra_info("ssl_object") is not None
        transport.set_write_buffer_limits(high=1 if is_tls else 0, low=0)
        self._close_after(_HEAD_WITHIN_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_open()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # If the head is complete, the count has been reset by now.
        if self._is_in_head and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head is longer than {MOST_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = self._is_in_message = True
        self.scope["state"] |= {ABORT_KEY: self.transport.abort, LEAVING_KEY: self.transport.is_closing}
        if self._timer is None:
            self._close_after(_HEAD_WITHIN_S)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        self._keep_open()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_message = False
        self._keep_open()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time for the rest of the body after the response."""
        super().on_response_complete()
        if self._is_in_message and not self._is_in_head and self._timer is None:
            self._close_after(_REST_WITHIN_S)

    def send_400_response(self, msg: str) -> None:
        """Respond to malformed HTTP with a problem, and close the connection."""
        error = ApiError(ProblemType.MALFORMED_REQUEST, f"{msg.rstrip('.')}; send a well-formed request")
        body = bytes(answer(error, "").body)
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {PROBLEM_JSON}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _close_after(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _keep_open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
