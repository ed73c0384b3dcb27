"""Batches lent to consumers: delivered at least once, never again after an acknowledgement.

    READY --lend--> LENT --ack--> ACKED (memory is returned when no response sends and no consumer reads it)
      ^              |
      +-- release, or not acknowledged in time: delivered again before newer batches

The ledger knows neither the fleet nor HTTP: the feeder borrows batches from the fleet when consumers ask for them and
expires loans, routes lend and acknowledge. Nothing is borrowed ahead: batches wait in the fleet's queue, where `onFull`
and staleness rules apply.
"""

import heapq
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import structlog

from cormorant_api.notifier import AsyncNotifier
from cormorant_contract.rest.status import Consumer
from cormorant_worker.errors import ControlTimeout, CormorantError
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.fleet.fleet import WorkerFleet

if TYPE_CHECKING:
    from cormorant_api.traces import RoundTrace, Traces

log = structlog.get_logger()

MOST_CONSUMERS = 256
"""Number of remembered consumers; the least recently seen is dropped first."""
_TICK_S = 0.2


@dataclass(slots=True, kw_only=True)
class Entry:
    """One batch in the ledger, guarded by the ledger's lock; or a copy of it, for the consumer to which it is lent."""

    number: int
    id: str
    loan: Loan
    trace: "RoundTrace | None"
    delivery: int = 0
    """Number of its newest delivery, from 1."""
    consumer: str = ""
    """Current holder; empty while ready."""
    lent_at: float = 0.0
    """When it was lent to its consumer, by the ledger's clock."""
    senders: int = 0
    """Responses that currently send its memory."""
    is_acked: bool = False
    is_read: Callable[[], bool] = lambda: False
    """Whether a consumer currently reads its memory in place."""


@dataclass(slots=True)
class ConsumerRecord:
    taken: int = 0
    acked: int = 0
    last_seen: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    ready: int
    lent: int
    acked: int
    acked_frames: int
    redelivered: int
    stale_frames: int
    """Frames dropped because the consumer or the job asked for fresher batches."""
    oldest_lent_s: float | None
    """Seconds since the oldest batch that is not acknowledged was handed out; None when there is none."""


class Ledger:
    """Every batch between the fleet and its consumers. Thread-safe."""

    def __init__(
        self,
        *,
        epoch: str,
        ack_within_s: float,
        on_settled: Callable[[int], "Future[None]"],
        traces: "Traces | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`epoch`: first part of every batch id, unique to this run of the head. `on_settled`: called with the total of
        frames that will not be delivered again; must be quick and not call the ledger. Returns a future that is done
        once no later head delivers them either.
        """
        self.epoch = epoch
        self.ack_within_s = ack_within_s
        self.notifier = AsyncNotifier()
        """Notified when a batch becomes ready and when the last one is settled."""
        self._on_settled = on_settled
        self._traces = traces
        self._clock = clock
        self._lock = threading.Lock()
        """Guards everything below."""
        self._entries: dict[int, Entry] = {}
        self._ready: list[int] = []
        """Heap of numbers, so that returned batches come before newer ones."""
        self._next = 0
        self.is_exhausted = False
        """The fleet has no more batches."""
        self._returned: frozenset[int] = frozenset()
        self._kept: Future[None] = Future()
        """A future that is done once all acknowledgements so far are durable."""
        self._kept.set_result(None)
        self._acked = self._acked_frames = self._redelivered = self._stale_frames = 0
        self._consumers: OrderedDict[str, ConsumerRecord] = OrderedDict()

    # -- the fleet's side --------------------------------------------------------------------------------------

    def add(self, loan: Loan) -> None:
        trace = None if self._traces is None else self._traces.begin_round(loan)
        with self._lock:
            batch_id = f"{self.epoch}-{self._next}"
            self._entries[self._next] = Entry(number=self._next, id=batch_id, loan=loan, trace=trace)
            heapq.heappush(self._ready, self._next)
            self._next += 1
        self.notifier.notify()

    def exhaust(self) -> None:
        with self._lock:
            self.is_exhausted = True
        self.notifier.notify()

    def expire(self) -> int:
        """Take back batches that were not acknowledged in time, and return acknowledged memory that is no longer read.
        Returns the number of late batches.
        """
        now = self._clock()
        with self._releasing() as over:
            entries = tuple(self._entries.values())
            late = [e for e in entries if e.consumer and e.lent_at + self.ack_within_s <= now]
            for entry in late:
                self._take_back(entry)
            for entry in entries:
                self._forget_if_over(entry, over)
        if late:
            self.notifier.notify()
        return len(late)

    def close(self) -> None:
        """Return every loan that is not being read; the others follow when their response ends."""
        with self._releasing() as over:
            self._returned = frozenset(entry.number for entry in self._entries.values() if not entry.is_acked)
            for entry in tuple(self._entries.values()):
                self._end(entry, "returned", over)
            self._ready.clear()
            self.is_exhausted = True
        self.notifier.notify()

    # -- the consumers' side -----------------------------------------------------------------------------------

    def lend(self, consumer: str, *, oldest_version: int = 0) -> Entry | None:
        """Lend the oldest ready batch to a consumer; None if none is ready. Call `sent` when the response no longer
        reads its memory. `oldest_version`: drop and count batches with frames of an older version. Random frames
        (version -1) are never too old.
        """
        lent: Entry | None = None
        with self._releasing() as over:
            record = self._consumers.setdefault(consumer, ConsumerRecord())
            record.last_seen = datetime.now(UTC)
            self._consumers.move_to_end(consumer)
            if len(self._consumers) > MOST_CONSUMERS:
                self._consumers.popitem(last=False)
            while self._ready and lent is None:
                entry = self._entries[heapq.heappop(self._ready)]
                if 0 <= entry.loan.min_version < oldest_version:
                    self._stale_frames += entry.loan.num_frames
                    self._end(entry, "stale", over)
                    self._settle()
                    continue
                entry.consumer, entry.lent_at = consumer, self._clock()
                entry.delivery += 1
                entry.senders += 1
                self._redelivered += entry.delivery > 1
                record.taken += 1
                if entry.trace is not None:
                    entry.trace.lent()
                lent = replace(entry)
        return lent

    def sent(self, batch_id: str) -> None:
        """A response no longer reads the batch's memory."""
        with self._releasing() as over:
            entry = self._entries[self._number(batch_id)]  # it stays until its last response ends
            entry.senders -= 1
            if entry.trace is not None:
                entry.trace.sent()
            self._forget_if_over(entry, over)

    def attach(self, batch_id: str, *, is_read: Callable[[], bool]) -> None:
        """Keep a batch's memory while `is_read()`, which must be quick."""
        with self._lock:
            self._entries[self._number(batch_id)].is_read = is_read

    def ack(self, batch_id: str) -> "Future[None] | None":
        """Acknowledge a batch, also one that another consumer holds. This head does not deliver it again.

        Returns:
            A future that is done once no later head delivers it either, also for a repeated acknowledgement. None for
            an unknown id, and for a batch that `close` returned: the next head collects its frames again.
        """
        with self._releasing() as over:
            number = self._number(batch_id)
            if number < 0 or number in self._returned:
                return None
            entry = self._entries.get(number)
            if entry is None or entry.is_acked:
                return self._kept
            if not entry.consumer:
                # It was taken back, and its previous consumer acknowledges it late.
                self._ready.remove(number)
                heapq.heapify(self._ready)
            self._acked += 1
            self._acked_frames += entry.loan.num_frames
            if (record := self._consumers.get(entry.consumer)) is not None:
                record.acked += 1
            entry.loan.acknowledge()
            self._settle()
            self._end(entry, "acknowledged", over)
        self.notifier.notify()
        return self._kept

    def release(self, batch_id: str, delivery: int) -> bool:
        """Return a batch unused: the next consumer gets it. False for an unknown id. Releasing an earlier delivery has
        no effect: it has expired, and another consumer may be reading the batch.
        """
        with self._lock:
            number = self._number(batch_id)
            entry = self._entries.get(number)
            if entry is not None and entry.consumer and entry.delivery == delivery:
                self._take_back(entry)
        self.notifier.notify()
        return number >= 0

    @property
    def has_ended(self) -> bool:
        """Whether all batches are acknowledged and the fleet has no more."""
        with self._lock:
            return self.is_exhausted and all(entry.is_acked for entry in self._entries.values())

    def counts(self) -> LedgerCounts:
        with self._lock:
            lent = [e.lent_at for e in self._entries.values() if e.consumer]
            return LedgerCounts(
                ready=len(self._ready),
                lent=len(lent),
                acked=self._acked,
                acked_frames=self._acked_frames,
                redelivered=self._redelivered,
                stale_frames=self._stale_frames,
                oldest_lent_s=max(0.0, self._clock() - min(lent)) if lent else None,
            )

    def consumers(self) -> tuple[Consumer, ...]:
        """Consumers, sorted by name."""
        with self._lock:
            held = Counter(entry.consumer for entry in self._entries.values())
            return tuple(
                Consumer(
                    name=name, taken=record.taken, acked=record.acked, lent=held[name], last_seen_at=record.last_seen
                )
                for name, record in sorted(self._consumers.items())
            )

    @contextmanager
    def _releasing(self) -> Iterator[list[Loan]]:
        """Hold the lock. Loans appended to the list are released after it, because releasing takes the fleet's lock."""
        over: list[Loan] = []
        with self._lock:
            yield over
        for loan in over:
            loan.release()

    # -- inside the lock ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._kept = self._on_settled(self._acked_frames + self._stale_frames)

    def _take_back(self, entry: Entry) -> None:
        entry.consumer = ""
        heapq.heappush(self._ready, entry.number)

    def _end(self, entry: Entry, how: str, over: list[Loan]) -> None:
        """Never deliver it again."""
        if entry.trace is not None and not entry.is_acked:
            entry.trace.over(how)
        entry.is_acked, entry.consumer = True, ""
        self._forget_if_over(entry, over)

    def _forget_if_over(self, entry: Entry, over: list[Loan]) -> None:
        if entry.is_acked and not entry.senders and not entry.is_read():
            del self._entries[entry.number]
            over.append(entry.loan)

    def _number(self, batch_id: str) -> int:
        """The number in an id of this ledger; -1 for other text."""
        digits = batch_id.rpartition("-")[2]
        number = int(digits) if digits.isdecimal() and len(digits) <= 18 else -1
        return number if number < self._next and batch_id == f"{self.epoch}-{number}" else -1


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
        is_over = self.error is not None or self._ledger.is_exhausted
        return not is_over and (self._is_probing or self.num_waiting > self._ledger.counts().ready)

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
                self.error = error
                self._ledger.notifier.notify()
                continue
            if loan is None:
                self._ledger.exhaust()
            else:
                self._ledger.add(loan)
            del loan  # this thread waits; a batch that is given back meanwhile is to be freed
