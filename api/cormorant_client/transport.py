"""HTTP over the standard library: addresses and tokens of heads; connections that are reused, and send bodies from
memory and receive them into memory.

One path for control calls and bulk bytes. Why not a library: docs/decisions/0034.
"""

import http.client
import json
import os
import select
import socket
import ssl
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import numpy as np

from cormorant_client.errors import BadAddress, ClientClosed

Role = Literal["read", "write", "operator"]
ROLES: tuple[Role, ...] = ("read", "write", "operator")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    """Path before `/v1`, for heads behind a proxy."""

    @property
    def is_loopback(self) -> bool:
        """True if the address can only be this machine."""
        return self.host in _LOOPBACK

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"


def parse_address(url: str) -> Address:
    """Read `http://host:8000`.

    Raises:
        BadAddress: not an http or https URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadAddress(f'"{url}" is not a URL: {error}; use the form http://127.0.0.1:8000') from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise BadAddress(f'"{url}" is not the URL of a head; use the form http://127.0.0.1:8000')
    if parts.username or parts.password or parts.query or parts.fragment:
        raise BadAddress("a head's URL has only scheme, host and port; pass the token as a separate argument")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(host=parts.hostname, port=port or (443 if is_tls else 80), is_tls=is_tls, prefix=prefix)


def read_token(path: str | os.PathLike[str], role: Role = "write") -> str:
    """Read the token of a role, or of the next higher role in the file: JSON by role, or one token alone.

    Raises:
        BadAddress: the file cannot be read, or has no token of this role or a higher one.
    """
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or error
        raise BadAddress(f"cannot read the token file {os.fspath(path)}: {reason}") from error
    if not text:
        raise BadAddress(f"the token file {os.fspath(path)} is empty")
    if not text.startswith("{"):
        return text
    try:
        tokens = json.loads(text)
    except ValueError as error:
        raise BadAddress(f"the token file {os.fspath(path)} is not valid JSON: {error}") from error
    for candidate in ROLES[ROLES.index(role) :]:
        if isinstance(token := tokens.get(candidate), str) and token:
            return token
    found = ", ".join(map(str, tokens)) or "none"
    raise BadAddress(f"the token file {os.fspath(path)} has no token for role {role}; it has {found}")


Bytes = bytes | bytearray | memoryview
Dial = Callable[[Address, float], socket.socket]
"""Opens a connection to an address within a time limit in seconds; raises OSError."""

_SEND_AT_ONCE = 4 * 1024 * 1024
"""Bytes per `sendall`. The socket's timeout covers one call: it limits a stall, not the whole body."""
_MOST_IDLE = 8
_CONNECT_S = 10.0
_TCP_S = 4.0
"""Timeout of one connection attempt. A packet to a Service without a pod is lost, and the kernel's retries back off: a
new attempt connects sooner."""


class Broken(Exception):
    """The connection broke, or none could be made; whether the head saw the request is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    status: int
    headers: http.client.HTTPMessage
    body: memoryview


def dial_tcp(address: Address, timeout_s: float) -> socket.socket:
    made = socket.create_connection((address.host, address.port), min(timeout_s, _TCP_S))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


@dataclass(kw_only=True, eq=False)
class Transport:
    """Connections to the listeners of one head. Thread-safe: each request has its own connection."""

    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    server_name: str = ""
    """The host that the certificate names; empty: that of the address."""
    timeout_s: float
    """Seconds without data after which a connection counts as broken."""
    dial: Dial = dial_tcp
    closed: threading.Event = field(default_factory=threading.Event, init=False)
    _lock: "threading.RLock" = field(default_factory=threading.RLock, init=False)
    """Guards the fields below. Reentrant: the garbage collector may finalize an abandoned iterator in a thread that
    holds it."""
    _idle: dict[Address, list[http.client.HTTPConnection]] = field(default_factory=dict, init=False)
    _in_use: set[http.client.HTTPConnection] = field(default_factory=set, init=False)
    _twins: "weakref.WeakSet[Transport]" = field(default_factory=weakref.WeakSet, init=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_all, self._idle)

    def twin(self) -> "Transport":
        """Another transport to the same head. It can be closed separately, and closes with this one."""
        made = replace(self)
        with self._lock:
            self._twins.add(made)
            if self.closed.is_set():
                made.close()
        return made

    def request(
        self,
        address: Address,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Sequence[Bytes] = (),
        wait_s: float = 0.0,
    ) -> HttpReply:
        """Send one request and receive its whole response; arguments as in `open`.

        Raises:
            Broken: the connection broke or none was made.
        """
        with self.open(address, method, path, headers=headers, body=body, wait_s=wait_s) as response:
            if response.length is None:
                received = memoryview(bytearray(response.read()))
            else:
                # Not zeroed, unlike a bytearray: every byte is about to be written.
                received = memoryview(np.empty(response.length, np.uint8))  # type: ignore[arg-type]  # arrays are buffers
                if missing := len(received) - response.readinto(received):
                    raise http.client.IncompleteRead(b"", missing)
            return HttpReply(status=response.status, headers=response.headers, body=received)

    @contextmanager
    def open(
        self,
        address: Address,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Sequence[Bytes] = (),
        wait_s: float = 0.0,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request; read its response within the block. The connection is reused if the whole response was
        read.

        Args:
            path: with the query, from `/v1` on.
            body: pieces, sent one after another without being joined.
            wait_s: seconds that the head may take beyond the usual timeout.

        Raises:
            Broken: the connection broke or none was made, here or while reading.
        """
        connection, is_reusable = self._take(address), False
        try:
            connection.putrequest(method, address.prefix + path, skip_accept_encoding=True)
            sent = {"Authorization": f"Bearer {self.token}"} if self.token else {}
            sent.update(headers or {})
            if "opentelemetry.trace" in sys.modules:  # a publish continues the trace of the caller's span
                from opentelemetry.propagate import inject

                inject(sent)
            size = sum(len(piece) for piece in body)
            if body or method in {"PUT", "POST"}:
                sent["Content-Length"] = str(size)
            for name, value in sent.items():
                connection.putheader(name, value)
            # The head may refuse before it has read the whole body; its answer says why, if it can still be read.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.endheaders(
                    memoryview(piece)[at : at + _SEND_AT_ONCE]
                    for piece in (body if size > _SEND_AT_ONCE else [b"".join(body)])
                    for at in range(0, len(piece), _SEND_AT_ONCE)
                )
                connection.sock.settimeout(self.timeout_s + wait_s)
            response = connection.getresponse()
            yield response
            is_reusable = response.isclosed() and not response.will_close
        except (OSError, http.client.HTTPException) as error:
            raise Broken(_reason(error)) from error
        finally:
            with self._lock:
                self._in_use.discard(connection)
                kept = self._idle.setdefault(address, [])
                if is_reusable and not self.closed.is_set() and len(kept) < _MOST_IDLE:
                    kept.append(connection)
                else:
                    connection.close()

    def close(self, how: int = socket.SHUT_RDWR) -> None:
        """Close every connection: requests in progress fail, and new ones are refused. May be called twice.

        Shuts down only the write side (SHUT_WR): the head notices, and answers that it has already sent can still be
        read.
        """
        with self._lock:
            self.closed.set()
            _close_all(self._idle)
            for used in [connection.sock for connection in self._in_use]:
                if used is not None:
                    with suppress(OSError):
                        # On a plain socket: shutting down an SSLSocket removes its encryption, and the request would
                        # continue in plain text.
                        socket.socket.shutdown(used, how)
            for twin in tuple(self._twins):
                twin.close(how)

    def _take(self, address: Address) -> http.client.HTTPConnection:
        with self._lock:
            kept = self._idle.get(address, [])
            while kept:
                connection = kept.pop()
                poll = select.poll()
                poll.register(connection.sock, select.POLLIN)
                if not poll.poll(0):  # one that is readable was closed by the head in the meantime
                    self._in_use.add(connection)
                    connection.sock.settimeout(self.timeout_s)
                    return connection
                connection.close()
        made = http.client.HTTPConnection(address.host, address.port)
        made.auto_open = 0  # only `dial` may open connections
        if not self.closed.is_set():
            made.sock = self._connect(address)
        with self._lock:
            if self.closed.is_set():
                made.close()
                raise ClientClosed
            self._in_use.add(made)
        return made

    def _connect(self, address: Address) -> socket.socket:
        within_s = min(self.timeout_s, _CONNECT_S)
        try:
            made = self.dial(address, within_s)
            try:
                made.settimeout(within_s)
                if address.is_tls and self.tls is not None:
                    made = self.tls.wrap_socket(made, server_hostname=self.server_name or address.host)
                made.settimeout(self.timeout_s)
            except OSError:
                made.close()
                raise
        except ssl.SSLCertVerificationError as error:
            # Do not retry: unlike an absent head, this error does not go away.
            remedy = "renew it, or pass the CA to trust as ca_file (on the command line --ca-file)"
            if "mismatch" in error.verify_message:
                remedy = "connect to a name that it has, or pass that name as server_name"
            why = error.verify_message.rstrip(".")
            raise BadAddress(f"the certificate of {address} was rejected: {why}; {remedy}") from error
        except OSError as error:
            raise Broken(_reason(error)) from error
        return made


def _close_all(idle: dict[Address, list[http.client.HTTPConnection]]) -> None:
    """Close idle connections; also called when a client is garbage-collected."""
    for kept in idle.values():
        while kept:
            kept.pop().close()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead):
        return "the connection was closed in the middle"
    return " ".join(str(error).split()) or type(error).__name__
