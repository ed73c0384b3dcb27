"""Connection to one head for every part of the client: requests with retries, discovery of the data port, events.

control  --port       small requests
bulk     --data-port  batches, weights, state. `GET /v1/status` names it; if unreachable, the control port is used
"""

import http.client
import json
import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel
from pydantic_core import from_json

from cormorant_client.errors import ClientClosed, HeadUnreachable, NotNow, error_for
from cormorant_client.transport import Address, Broken, Bytes, HttpReply, Transport
from cormorant_contract.rest.live import Event
from cormorant_contract.rest.status import Status

Model = TypeVar("Model", bound=BaseModel)
Params = Mapping[str, str | int | float | None]

log = logging.getLogger(__name__)

_STRANGER_S = 60.0
"""Longest time to wait for a head that has never answered: its URL may be wrong."""
_SILENT_S = 2.0
"""Shorter waits are not logged."""
_TELL_EVERY_S = 60.0
_FIRST_S = 0.1
_LONGEST_S = 1.0
"""Retry often: a head restarts within seconds, and a refused connection costs nothing."""


class Patience:
    """A time budget for retries. Waits grow from 0.1 to 1 s, each with full jitter. Why
    not a library: docs/decisions/0034.
    """

    def __init__(self, total_s: float, *, interrupted: threading.Event, what: str) -> None:
        """`interrupted` ends a wait; `what` names the awaited thing in the log."""
        self._interrupted, self._what = interrupted, what
        self._next_s = _FIRST_S
        self.total_s = total_s
        self.begin()

    def begin(self) -> None:
        """Restart the budget. It runs from the next failure on."""
        self._began: float | None = None
        self._tell_after_s = _SILENT_S

    @property
    def spent_s(self) -> float:
        """Seconds since the budget began."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def wait(self, reason: str, *, at_least_s: float = 0.0) -> bool:
        """Sleep before the next try. False if the budget is used up or the sleep was interrupted: give up."""
        if self._began is None:
            self._began = time.monotonic()
        left = self.total_s - self.spent_s
        if left <= 0 or self._interrupted.is_set():
            return False
        # Waiting must not look like hanging.
        if self.spent_s >= self._tell_after_s:
            self._tell_after_s = self.spent_s + _TELL_EVERY_S
            log.warning("waiting for %s, %.0f of at most %.0f s (%s)", self._what, self.spent_s, self.total_s, reason)
        seconds = max(at_least_s, random.uniform(0.5, 1.0) * self._next_s)
        self._next_s = min(_LONGEST_S, 2 * self._next_s)
        return not self._interrupted.wait(min(seconds, left))


@dataclass(kw_only=True)
class HeadConnection:
    """Requests to one head. Thread-safe."""

    address: Address
    transport: Transport
    reconnect_s: float
    """How long to retry a request that is safe to repeat while the head is away."""
    # Written by any thread: a stale value costs a request, or a shorter retry limit.
    has_answered: bool = False
    bulk: Address | None = None
    """Address for bulk bytes; None: unknown, or it has failed since."""
    receipts: dict[str, str] = field(default_factory=dict)
    """Headers that tell the next head which frames this one settled; shared with clients made by `twin`."""

    def twin(self) -> Self:
        """A second client of the same head, with its own connections; `close` aborts its requests."""
        return replace(self, transport=self.transport.twin())

    def patience(self, total_s: float) -> Patience:
        """A time budget for this head that ends when the connection is closed."""
        return Patience(total_s, interrupted=self.transport.closed, what=f"the head at {self.address}")

    def get(self, model: type[Model], path: str, *, params: Params | None = None, wait_s: float = 0.0) -> Model:
        return self.parse(model, self.send("GET", path, params=params, wait_s=wait_s))

    def post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        wait_s: float = 0.0,
        is_safe: bool = True,
        patience_s: float | None = None,
    ) -> HttpReply:
        data = [json.dumps(body).encode()] if body is not None else []
        headers = {"Content-Type": "application/json"} if data else {}
        return self.send(
            "POST", path, body=data, headers=headers, wait_s=wait_s, is_safe=is_safe, patience_s=patience_s
        )

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        body: Sequence[Bytes] = (),
        wait_s: float = 0.0,
        is_bulk: bool = False,
        is_safe: bool = True,
        patience_s: float | None = None,
    ) -> HttpReply:
        """Send a request, retrying while the head is away or not ready.

        Args:
            path: below the head's address, from `/v1` on.
            params: query parameters; None values are omitted.
            body: pieces, which must not change until this returns.
            wait_s: seconds that the request allows the head to wait before it answers.
            is_bulk: prefer the data port.
            is_safe: the request may be repeated.
            patience_s: instead of `reconnect_s`.

        Raises:
            HeadUnreachable: no answer in the time allowed, or this connection was closed.
            HeadError: the head answered with a problem.
        """
        given = {name: value for name, value in (params or {}).items() if value is not None}
        target = f"{path}?{urlencode(given)}" if given else path
        usual_s = self.reconnect_s if self.has_answered else min(self.reconnect_s, _STRANGER_S)
        patience = self.patience(usual_s if patience_s is None else patience_s)
        is_repeated = False
        while True:
            address = self._bulk_address() if is_bulk else self.address
            try:
                reply = self.transport.request(address, method, target, headers=headers, body=body, wait_s=wait_s)
            except Broken as error:
                is_repeated, self.bulk = True, None
                if is_safe and patience.wait(f"{method} {path}: {error}"):
                    continue
                if self.transport.closed.is_set():
                    raise ClientClosed from error
                tried = f" for {patience.spent_s:.0f} s" if is_safe and patience.total_s else ""
                raise HeadUnreachable(
                    f"no head answers at {self.address}{tried} ({method} {path}: {error}); check that it is "
                    "running and that the URL is right"
                ) from error
            self.has_answered = True
            if patience_s is None:
                patience.total_s = self.reconnect_s
            if 200 <= reply.status < 300:
                return reply
            problem = error_for(reply.status, bytes(reply.body), where=f"{method} {address}{path}")
            problem.is_of_repetition = is_repeated
            # Proxies answer 502 and 504 while a head restarts; our own heads say 429 and 503, also when they drain: the
            # next one takes over.
            is_proxys = problem.problem.type == "about:blank" and problem.status in {502, 504}
            if not (is_safe and (isinstance(problem, NotNow) or is_proxys)):
                raise problem
            if not patience.wait(str(problem), at_least_s=problem.problem.retry_after_s or 0.0):
                raise problem

    def parse(self, model: type[Model], reply: HttpReply) -> Model:
        """Read a JSON answer.

        Raises:
            HeadError: this release of the client cannot read the body.
        """
        try:
            return model.model_validate_json(bytes(reply.body))
        except ValueError as error:
            raise error_for(reply.status, bytes(reply.body), where=str(self.address)) from error

    @contextmanager
    def stream(self, path: str, headers: Mapping[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        """Open server-sent events on the control port; see `Transport.open`. HeadError if the head refuses."""
        accept = {"Accept": "text/event-stream", **(headers or {})}
        with self.transport.open(self.address, "GET", path, headers=accept) as response:
            if response.status != 200:
                raise error_for(response.status, response.read(), where=f"GET {path}")
            yield response

    def close(self, how: int = socket.SHUT_RDWR) -> None:
        self.transport.close(how)

    def _bulk_address(self) -> Address:
        if self.bulk is None:
            status = self._ask_status(self.address)
            if status is None:
                return self.address
            candidate = replace(self.address, port=status.data_port) if status.data_port else self.address
            other = self._ask_status(candidate) if status.data_port else None
            # Behind a proxy or a forwarded port, the data port's number may belong to another server.
            self.bulk = candidate if other is not None and other.epoch == status.epoch else self.address
        return self.bulk

    def _ask_status(self, address: Address) -> Status | None:
        """The status at an address; None if no head answers: the request itself will fail or use another address."""
        try:
            reply = self.transport.request(address, "GET", "/v1/status")
            return Status.model_validate_json(bytes(reply.body)) if reply.status == 200 else None
        except (Broken, ValueError):
            return None


def default_owner() -> str:
    """Name of this process in the list of leases."""
    return f"{socket.gethostname()}-{os.getpid()}"


def quoted(name: str) -> str:
    return quote(name, safe="")


def read_events(head: HeadConnection, *, last_id: str | None = None) -> Iterator[Event]:
    """Yield events until the head is closed here. A broken connection is opened again after the last event seen.

    Raises:
        HeadUnreachable: the head was unreachable for longer than `reconnect_s`, or is closed.
        HeadError: the head refuses.
    """
    patience = head.patience(head.reconnect_s)
    while True:
        opened_at = math.inf
        try:
            with head.stream("/v1/events", {"Last-Event-ID": last_id} if last_id else None) as response:
                opened_at = time.monotonic()
                for _, last_id, data in parse_events(response):
                    yield Event.model_validate({"id": last_id, **from_json(data)})
            reason = "the stream ended"
        except Broken as error:
            reason = str(error)
        # A quiet stream is no absence of the head; one that ends at once is: of a head that closes, or another server.
        if time.monotonic() - opened_at >= _FIRST_S:
            patience.begin()
        if not patience.wait(reason):
            raise HeadUnreachable(f"lost the event stream of {head.address} and could not reconnect: {reason}")


def parse_events(lines: "http.client.HTTPResponse | Iterator[bytes]") -> Iterator[tuple[str, str, str]]:
    """Kind, id and data of each event; comments are ignored."""
    fields: dict[str, str] = {}
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        name, _, value = line.partition(":")
        if name:
            fields[name] = value.removeprefix(" ")
        elif not line and "data" in fields:
            yield fields.pop("event", ""), fields.get("id", ""), fields.pop("data")
