"""Borrows batches from the fleet when consumers ask for them, and expires loans in the ledger.

Nothing is borrowed ahead: batches wait in the fleet's queue, where `onFull` and staleness rules apply.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from cormorant_api.batches.ledger import Ledger
from cormorant_worker.errors import ControlTimeout, CormorantError
from cormorant_worker.fleet.fleet import WorkerFleet

log = structlog.get_logger()

_TICK_S = 0.2


class BatchFeeder:
    """Moves batches from the fleet into the ledger while consumers wait for more than it has."""

    def __init__(self, fleet: WorkerFleet, ledger: Ledger) -> None:
        self.error: CormorantError | None = None
        """The failure of the fleet that ended the batches."""
        self._fleet, self._ledger = fleet, ledger
        self._changed = threading.Condition()
        """Guards `num_waiting`, `_is_probing`, `_is_closed`."""
        self.num_waiting = 0
        """Consumers that wait for a batch."""
        self._is_probing = False
        self._is_closed = False
        self._is_over = False
        """The fleet has no more batches, or failed."""
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop borrowing. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    @contextmanager
    def demand(self) -> Iterator[None]:
        """Within the block, one more consumer waits for a batch."""
        with self._changed:
            self.num_waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.num_waiting -= 1

    def probe(self) -> None:
        """Detect the end of the fleet's batches even if no consumer asks."""
        with self._changed:
            self._is_probing = True
            self._changed.notify_all()

    def _wants_more(self) -> bool:
        return not self._is_over and (self._is_probing or self.num_waiting > self._ledger.counts().ready)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._wants_more(), _TICK_S)
                if self._is_closed:
                    return
            if late := self._ledger.expire():
                log.warning("batches_not_acknowledged", batches=late, seconds=self._ledger.ack_within_s)
            if not self._wants_more():
                continue
            try:
                loan = self._fleet.borrow(timeout_s=_TICK_S)
            except ControlTimeout:
                continue
            except CormorantError as error:
                if not self._is_closed:
                    log.warning("batches_ended", reason=str(error))
                self.error, self._is_over = error, True
                self._ledger.notifier.notify()
                continue
            if loan is None:
                self._is_over = True
                self._ledger.exhaust()
            else:
                self._ledger.add(loan)
            del loan  # this thread waits; a batch that is given back meanwhile is to be freed
