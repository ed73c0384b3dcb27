"""HTTP over the standard library: connections kept and used again, bodies sent from and received into memory.

One path for control calls and bulk bytes. Against httpx2 on the same loopback server it took half the time for a small
answer and a third for 28 MB: httpx2 joins chunks, this reads into one buffer of the right size. Measure again with
`python -m benchmarks.client_transport`.
"""

import http.client
import select
import socket
import ssl
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from cormorant_client.address import Address
from cormorant_client.errors import BadAddress, HeadUnreachable

Bytes = bytes | bytearray | memoryview

_SEND_AT_ONCE = 4 * 1024 * 1024
"""A socket's timeout covers one `sendall`: pieces make it a limit for standing still, not for the whole body."""
_MOST_IDLE = 8
_CONNECT_S = 10.0


class Broken(Exception):
    """The connection broke, or none could be made; whether the head saw the request is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    status: int
    headers: Mapping[str, str]
    """Keys in lower case."""
    body: memoryview

    @property
    def is_ok(self) -> bool:
        """True for 2xx."""
        return 200 <= self.status < 300


class Interrupt:
    """Ends a wait from another thread: `set` breaks the request that is under way and forbids the next."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        """Guards the connection that waits."""
        self._connection: http.client.HTTPConnection | None = None

    def set(self) -> None:
        """Break what waits. May be called twice."""
        self.event.set()
        with self._lock:
            if self._connection is not None and self._connection.sock is not None:
                with suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def around(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """While this is open, `set` breaks the connection."""
        with self._lock:
            self._connection = connection
        try:
            if self.event.is_set():
                raise Broken("interrupted")
            yield
        finally:
            with self._lock:
                self._connection = None


class _TlsConnection(http.client.HTTPConnection):
    """HTTPS to an address whose certificate may name another host, as behind a forwarded port."""

    def __init__(self, address: Address, context: ssl.SSLContext, *, name: str, timeout_s: float) -> None:
        super().__init__(address.host, address.port, timeout=timeout_s)
        self._context, self._name = context, name or address.host

    def connect(self) -> None:
        super().connect()
        self.sock = self._context.wrap_socket(self.sock, server_hostname=self._name)


class Transport:
    """Connections to the listeners of one head. Thread-safe: a request has a connection to itself."""

    def __init__(
        self,
        *,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        timeout_s: float,
    ) -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls, self._server_name = tls, server_name
        self.timeout_s = timeout_s
        """A connection that says nothing for so long is broken."""
        self._connect_timeout_s = min(timeout_s, _CONNECT_S)
        self._lock = threading.Lock()
        """Guards the idle connections."""
        self._idle: dict[Address, list[http.client.HTTPConnection]] = {}
        weakref.finalize(self, _close_all, self._idle)
        self._is_closed = False

    def request(
        self,
        address: Address,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Sequence[Bytes] = (),
        wait_s: float = 0.0,
        interrupt: Interrupt | None = None,
    ) -> HttpReply:
        """Send one request and receive its whole answer.

        Args:
            path: with the query, from `/v1` on.
            body: pieces, sent one after another without being joined.
            wait_s: how long the head may think about it, beyond the usual timeout.
            interrupt: breaks the request from another thread.

        Raises:
            Broken: the connection broke or none was made.
        """
        connection = self._take(address)
        try:
            with (interrupt or Interrupt()).around(connection):
                response = self._exchange(connection, address, method, path, headers or {}, body, wait_s)
                received = _receive(response)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Broken(_reason(error)) from error
        except BaseException:
            connection.close()
            raise
        self._give_back(address, connection, response)
        told = {name.lower(): value for name, value in response.getheaders()}
        return HttpReply(status=response.status, headers=told, body=received)

    @contextmanager
    def stream(
        self, address: Address, path: str, *, headers: Mapping[str, str], interrupt: Interrupt
    ) -> Iterator[http.client.HTTPResponse]:
        """Open an answer without an end and read it as it comes.

        Raises:
            Broken: the connection broke or none was made, here or while reading.
        """
        connection = self._take(address)
        try:
            with interrupt.around(connection):
                yield self._exchange(connection, address, "GET", path, headers, (), wait_s=0.0)
        except (OSError, http.client.HTTPException) as error:
            raise Broken(_reason(error)) from error
        finally:
            connection.close()

    def close(self) -> None:
        """Close what is idle; connections in use are closed when they are given back."""
        with self._lock:
            self._is_closed = True
            _close_all(self._idle)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        address: Address,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Sequence[Bytes],
        wait_s: float,
    ) -> http.client.HTTPResponse:
        size = sum(len(piece) for piece in body)
        connection.putrequest(method, address.prefix + path, skip_accept_encoding=True)
        for name, value in {**self._headers, **headers, **_trace_context()}.items():
            connection.putheader(name, value)
        if body or method in {"PUT", "POST"}:
            connection.putheader("Content-Length", str(size))
        try:
            if 0 < size < _SEND_AT_ONCE:
                connection.endheaders(b"".join(body))
            else:
                connection.endheaders()
                for piece in body:
                    for start in range(0, len(piece), _SEND_AT_ONCE):
                        connection.send(memoryview(piece)[start : start + _SEND_AT_ONCE])
        except (BrokenPipeError, ConnectionResetError):
            # The head may have refused before it read all; its answer says why, if it still can be read.
            return connection.getresponse()
        assert connection.sock is not None
        connection.sock.settimeout(self.timeout_s + wait_s)
        return connection.getresponse()

    def _take(self, address: Address) -> http.client.HTTPConnection:
        if self._is_closed:
            raise HeadUnreachable("the client is closed; connect again")
        with self._lock:
            kept = self._idle.get(address, [])
            while kept:
                connection = kept.pop()
                if not _was_closed(connection):
                    connection.sock.settimeout(self.timeout_s)
                    return connection
                connection.close()
        if address.is_tls and self._tls is not None:
            made: http.client.HTTPConnection = _TlsConnection(
                address, self._tls, name=self._server_name, timeout_s=self._connect_timeout_s
            )
        else:
            made = http.client.HTTPConnection(address.host, address.port, timeout=self._connect_timeout_s)
        try:
            made.connect()
            made.sock.settimeout(self.timeout_s)
        except ssl.SSLCertVerificationError as error:
            made.close()
            # Waiting does not make it better, as it does with a head that is away.
            raise BadAddress(
                f"the certificate of {address} was rejected: {error.verify_message}; renew it, or pass the CA to "
                "trust as ca_file (on the command line --ca-file)"
            ) from error
        except OSError as error:
            made.close()
            raise Broken(_reason(error)) from error
        return made

    def _give_back(
        self, address: Address, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        with self._lock:
            kept = self._idle.setdefault(address, [])
            if not response.will_close and not self._is_closed and len(kept) < _MOST_IDLE:
                kept.append(connection)
                return
        connection.close()


def _close_all(idle: dict[Address, list[http.client.HTTPConnection]]) -> None:
    """Close idle connections, also of a client that was forgotten."""
    for kept in idle.values():
        while kept:
            kept.pop().close()


def _receive(response: http.client.HTTPResponse) -> memoryview:
    if response.length is None:
        return memoryview(bytearray(response.read()))
    # Not zeroed, unlike a bytearray: every byte is about to be written.
    buffer = memoryview(np.empty(response.length, np.uint8))  # type: ignore[arg-type]  # numpy arrays are buffers
    at = 0
    while at < len(buffer):
        count = response.readinto(buffer[at:])
        if not count:
            raise http.client.IncompleteRead(b"", len(buffer) - at)
        at += count
    response.close()
    return buffer


def _was_closed(connection: http.client.HTTPConnection) -> bool:
    """Readable while nothing was asked: the head closed it in the meantime."""
    if connection.sock is None:
        return True
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _trace_context() -> dict[str, str]:
    """`traceparent` of the caller's span, where the caller uses OpenTelemetry: a publish continues its trace."""
    carrier: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.propagate import inject

        inject(carrier)
    return carrier


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead):
        return "the connection was closed in the middle"
    return " ".join(str(error).split()) or type(error).__name__
