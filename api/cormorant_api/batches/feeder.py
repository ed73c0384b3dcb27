"""Borrows batches from the fleet as consumers ask for them, and keeps the ledger's time. One thread.

Nothing is borrowed ahead: what waits, waits in the fleet's own queue, where `onFull` and staleness rules reach it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import structlog

from cormorant_api.batches.ledger import L, Ledger, Lendable
from cormorant_worker.errors import ControlTimeout, CormorantError

log = structlog.get_logger()

_TICK_S = 0.2


L_co = TypeVar("L_co", bound=Lendable, covariant=True)


class BatchSource(Protocol[L_co]):
    """Where batches come from: a fleet."""

    def borrow(self, *, timeout_s: float | None = None) -> L_co | None:
        """The next batch; None when there will be none."""
        ...


class BatchFeeder(Generic[L]):
    """Moves batches from the fleet into the ledger while consumers wait for more than it has."""

    def __init__(self, source: BatchSource[L], ledger: Ledger[L]) -> None:
        self.error: CormorantError | None = None
        """Why there will be no more batches, if the fleet failed."""
        self._source, self._ledger = source, ledger
        self._changed = threading.Condition()
        """Guards `_waiting`, `_is_probing`, `_is_closed`."""
        self._waiting = 0
        self._is_probing = False
        self._is_closed = False
        self._borrower = threading.Thread(target=self._borrow, name="batches", daemon=True)
        self._timer = threading.Thread(target=self._keep_time, name="batch-leases", daemon=True)

    def start(self) -> None:
        self._borrower.start()
        self._timer.start()

    def close(self) -> None:
        """Borrow no more. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in (self._borrower, self._timer):
            if thread.is_alive():
                thread.join(timeout=5)

    @property
    def num_waiting(self) -> int:
        """Consumers that wait for a batch."""
        return self._waiting

    @contextmanager
    def demand(self) -> Iterator[None]:
        """Inside, one consumer waits for a batch."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def probe(self) -> None:
        """The fleet is done: let the ledger know, though no consumer asks."""
        with self._changed:
            self._is_probing = True
            self._changed.notify_all()

    def _wants_more(self) -> bool:
        return self._is_probing or self._waiting > self._ledger.counts().ready

    def _borrow(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or self._wants_more(), _TICK_S)
                    if self._is_closed:
                        return
                    if not self._wants_more():
                        continue
                try:
                    loan = self._source.borrow(timeout_s=_TICK_S)
                except ControlTimeout:
                    continue
                if loan is None:
                    self._ledger.exhaust()
                    return
                self._ledger.add(loan)
        except CormorantError as error:
            if not self._is_closed:
                log.warning("batches_ended", reason=str(error))
            self.error = error
            self._ledger.notifier.notify()

    def _keep_time(self) -> None:
        told = 0
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, _TICK_S):
                    return
            if late := self._ledger.expire():
                log.warning("batches_not_acknowledged", batches=late, seconds=self._ledger.ack_within_s)
            if (held := self._ledger.counts().held) > told:
                log.warning(
                    "batches_still_read",
                    batches=held,
                    reason="a consumer maps what others acknowledged; until it lets go, workers have less memory",
                )
            told = held
