"""One head, as every part of the client talks to it: requests with retries, the data port found and kept.

control  --port       small requests
bulk     --data-port  batches, weights, state: as `GET /v1/status` tells; the control port where it cannot be reached
"""

import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel

from cormorant_client.address import Address
from cormorant_client.errors import HeadUnreachable, NotNow, error_for
from cormorant_client.transport import Broken, Bytes, HttpReply, Interrupt, Transport
from cormorant_contract.rest.status import Status

Model = TypeVar("Model", bound=BaseModel)
Params = Mapping[str, str | int | float | None]

log = logging.getLogger(__name__)

_DATA_PORT_AGAIN_S = 30.0
"""A data port that could not be reached is tried again after so long."""
_STRANGER_S = 60.0
"""The most that is waited for a head that has not answered once: its URL may be wrong."""
_SILENT_S = 2.0
"""Waits that are shorter are not logged."""
_TELL_EVERY_S = 60.0
_FIRST_S = 0.1
_LONGEST_S = 3.0


class Patience:
    """A budget of time for one thing that may be tried again. Waits grow from 0.1 to 3 s, each with full jitter. Why
    not stamina: docs/decisions/0034.
    """

    def __init__(self, total_s: float) -> None:
        self._began = time.monotonic()
        self._until = self._began + total_s
        self._next_s = _FIRST_S
        self.total_s = total_s

    def extend(self, total_s: float) -> None:
        """There is reason to try for longer: so long since the first try."""
        self._until = max(self._until, self._began + total_s)
        self.total_s = max(self.total_s, total_s)

    @property
    def spent_s(self) -> float:
        """Seconds since the first try."""
        return time.monotonic() - self._began

    def wait(self, *, at_least_s: float = 0.0, interrupted: threading.Event | None = None) -> bool:
        """Sleep before the next try. False when the time is used up or it was interrupted: give up then."""
        left = self._until - time.monotonic()
        seconds = max(at_least_s, random.uniform(0.5, 1.0) * self._next_s)
        self._next_s = min(_LONGEST_S, 2 * self._next_s)
        if left <= 0:
            return False
        if interrupted is None:
            time.sleep(min(seconds, left))
            return True
        return not interrupted.wait(min(seconds, left))


class HeadConnection:
    """Requests to one head. Thread-safe."""

    def __init__(self, address: Address, transport: Transport, *, reconnect_s: float) -> None:
        self.address = address
        self._transport = transport
        self.reconnect_s = reconnect_s
        """How long a request that is safe to repeat is repeated while the head is away."""
        self._lock = threading.Lock()
        """Guards where the data port is, and what was logged."""
        self._bulk: Address | None = None
        self._bulk_until = 0.0
        self._has_answered = False
        self._next_telling = 0.0

    def get(
        self,
        model: type[Model],
        path: str,
        *,
        params: Params | None = None,
        wait_s: float = 0.0,
    ) -> Model:
        return self.parse(model, self.send("GET", path, params=params, wait_s=wait_s))

    def post(
        self,
        path: str,
        body: BaseModel | None = None,
        *,
        wait_s: float = 0.0,
        is_safe: bool = True,
        patience_s: float | None = None,
    ) -> HttpReply:
        data = [body.model_dump_json().encode()] if body is not None else []
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
        interrupt: Interrupt | None = None,
        patience_s: float | None = None,
    ) -> HttpReply:
        """Send a request, again and again while the head is away or not ready.

        Args:
            path: below the head's address, from `/v1` on.
            params: of the query; None values are left out.
            body: pieces; they must stay as they are until this returns.
            wait_s: how long the head was asked to wait before it answers.
            is_bulk: prefer the data port.
            is_safe: repeating it does no harm.
            interrupt: breaks it from another thread, which raises HeadUnreachable here.
            patience_s: instead of `reconnect_s`.

        Raises:
            HeadUnreachable: no answer in the time allowed.
            HeadError: the head's answer is a problem.
        """
        given = {name: value for name, value in (params or {}).items() if value is not None}
        target = f"{path}?{urlencode(given)}" if given else path
        usual_s = self.reconnect_s if self._has_answered else min(self.reconnect_s, _STRANGER_S)
        patience = Patience(usual_s if patience_s is None else patience_s)
        stopped = interrupt.event if interrupt else None
        is_repeated = False
        while True:
            address = self._bulk_address() if is_bulk else self.address
            try:
                reply = self._transport.request(
                    address, method, target, headers=headers, body=body, wait_s=wait_s, interrupt=interrupt
                )
            except Broken as error:
                is_repeated = True
                is_fallback = self._forget_bulk(address)
                may_go_on = is_safe and not (stopped and stopped.is_set())
                if may_go_on and not is_fallback:
                    self._tell(f"{method} {path}: {error}", patience)
                if may_go_on and (is_fallback or patience.wait(interrupted=stopped)):
                    continue
                tried = f" for {patience.spent_s:.0f} s" if is_safe and patience.total_s else ""
                raise HeadUnreachable(
                    f"no head answers at {self.address}{tried} ({method} {path}: {error}); check that it is "
                    "running and that the URL is right"
                ) from error
            self._has_answered = True
            if patience_s is None:
                patience.extend(self.reconnect_s)
            if reply.is_ok:
                return reply
            problem = error_for(reply.status, bytes(reply.body), where=f"{method} {address}{path}")
            problem.is_of_repetition = is_repeated
            # Proxies answer 502 and 504 while a head restarts; our own heads say 429 and 503, also when they drain: the
            # next one takes over.
            is_proxys = problem.problem.type == "about:blank" and problem.status in {502, 504}
            if not (is_safe and (isinstance(problem, NotNow) or is_proxys)):
                raise problem
            self._tell(str(problem), patience)
            if not patience.wait(at_least_s=problem.problem.retry_after_s or 0.0, interrupted=stopped):
                raise problem

    def parse(self, model: type[Model], reply: HttpReply) -> Model:
        """Read a JSON answer.

        Raises:
            HeadError: the body is not what this release of the client reads.
        """
        try:
            return model.model_validate_json(bytes(reply.body))
        except ValueError as error:
            raise error_for(reply.status, bytes(reply.body), where=str(self.address)) from error

    def stream(self, path: str, *, headers: Mapping[str, str], interrupt: Interrupt) -> Any:
        """Open an endless answer on the control port; see `Transport.stream`."""
        return self._transport.stream(self.address, path, headers=headers, interrupt=interrupt)

    def listeners(self) -> tuple[Address, ...]:
        """Where requests go at present."""
        return (self.address, self._bulk) if self._bulk else (self.address,)

    def close(self) -> None:
        self._transport.close()

    def _bulk_address(self) -> Address:
        with self._lock:
            if self._bulk is not None and time.monotonic() < self._bulk_until:
                return self._bulk
        found, until = self.address, time.monotonic() + _DATA_PORT_AGAIN_S
        try:
            status = self._ask_status(self.address)
            if status is not None and status.data_port:
                candidate = replace(self.address, port=status.data_port)
                other = self._ask_status(candidate)
                # Behind a proxy or a forwarded port, that port may belong to another server.
                if other is not None and other.epoch == status.epoch:
                    found, until = candidate, float("inf")
        except Broken:
            pass  # the request itself will tell, or go to the control port
        with self._lock:
            self._bulk, self._bulk_until = found, until
        return found

    def _ask_status(self, address: Address) -> Status | None:
        reply = self._transport.request(address, "GET", "/v1/status")
        try:
            return Status.model_validate_json(bytes(reply.body)) if reply.is_ok else None
        except ValueError:
            return None

    def _forget_bulk(self, address: Address) -> bool:
        """A listener broke. True when it was the data port: the control port can be tried at once."""
        with self._lock:
            was_bulk = self._bulk is not None and address == self._bulk and address != self.address
            self._bulk = self.address if was_bulk else None
            self._bulk_until = time.monotonic() + _DATA_PORT_AGAIN_S if was_bulk else 0.0
        return was_bulk

    def _tell(self, reason: str, patience: Patience) -> None:
        """Log that something is waited for, if it takes long: waiting must not look like hanging."""
        now = time.monotonic()
        with self._lock:
            if not _SILENT_S <= patience.spent_s < patience.total_s or now < self._next_telling:
                return
            self._next_telling = now + _TELL_EVERY_S
        log.warning(
            "waiting for the head at %s, %.0f of at most %.0f s (%s)",
            self.address, patience.spent_s, patience.total_s, reason,
        )  # fmt: skip


def quoted(name: str) -> str:
    return quote(name, safe="")
