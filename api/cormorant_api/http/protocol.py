"""uvicorn's HTTP protocol with limits that it lacks: size and duration of a request's head, unsent bytes in this
process, and data that a client keeps sending after the response.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cormorant_api.errors import ApiError
from cormorant_api.http.problems import answer
from cormorant_api.http.transfer import ABORT_KEY, LEAVING_KEY
from cormorant_contract.rest.base import PROBLEM_JSON
from cormorant_contract.rest.problems import ProblemType

MOST_HEAD_BYTES = 64 * 1024
_HEAD_WITHIN_S = 30.0
_REST_WITHIN_S = 10.0
"""Time for the rest of a body that was refused early. Closing at once would keep the client from reading the
response.
"""


class BoundedProtocol(HttpToolsProtocol):
    _head_bytes = 0
    _fields_bytes = 0
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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count header bytes again: a whole head may arrive in one piece."""
        self._fields_bytes += len(name) + len(value)
        if self._fields_bytes > MOST_HEAD_BYTES:
            raise ValueError("the request's head is too long")  # uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes, self._fields_bytes = False, 0, 0
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
