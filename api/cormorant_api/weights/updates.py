"""Tracks each publish by the receipts of the workers. See `rest/updates.py` for the states.

A receipt costs O(1) in workers and updates: records count their receipts, and only open records are visited.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from cormorant_api.notifier import AsyncNotifier
from cormorant_contract.rest.updates import FINAL_STATES, ReceiptState, Update, UpdateReceipt, UpdateState, WorkerCounts
from cormorant_worker.fleet.stats import WorkerReceipts

MOST_UPDATES = 100
"""Updates to remember. Their receipts of 1,000 workers take 15 MB."""
_OVER = frozenset({"superseded", "applied"})
"""Failed updates stay open: a late worker may still apply them."""


@dataclass(slots=True, kw_only=True)
class _Record:
    update: Update
    """The update without its receipts, which are stored below."""
    received: float
    """When the last byte arrived, by the tracker's clock."""
    receipts: dict[str, UpdateReceipt] = field(default_factory=dict)
    counts: Counter[ReceiptState] = field(default_factory=Counter)
    """Number of receipts by state."""
    slowest_ms: float | None = None
    handed_over: float = 0.0
    waited_s: float = 0.0
    """Unpaused time since the publish."""

    def change(self, **fields: Any) -> None:
        self.update = self.update.model_copy(update=fields)

    @property
    def workers(self) -> WorkerCounts:
        """Workers except lost ones."""
        counts = self.counts
        return WorkerCounts(total=counts.total() - counts["lost"], acked=counts["applied"], failed=counts["refused"])

    def describe(self, *, with_receipts: bool = True) -> Update:
        receipts = tuple(receipt for _, receipt in sorted(self.receipts.items())) if with_receipts else ()
        changes = {"workers": self.workers, "slowest_ms": self.slowest_ms, "receipts": receipts}
        return self.update.model_copy(update=changes)

    def mark(self, worker: str, state: ReceiptState, **changes: Any) -> None:
        before = self.receipts.get(worker)
        if before is not None:
            self.counts[before.state] -= 1
        else:
            before = UpdateReceipt(worker=worker, version=0, state=state)
        self.receipts[worker] = before.model_copy(update={"state": state, **changes})
        self.counts[state] += 1


class UpdateTracker:
    """The last 100 updates of this head. Thread-safe."""

    def __init__(
        self,
        *,
        apply_within_s: float,
        on_result: Callable[[Update], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`apply_within_s`: unpaused seconds after which a worker is late. `on_result`: called when an update is
        applied, late, failed or superseded.
        """
        self._on_result = on_result
        self.apply_within_s = apply_within_s
        self.notifier = AsyncNotifier()
        """Notified at every change."""
        self.clock = clock
        self._lock = threading.Lock()
        """Guards everything below."""
        self._records: OrderedDict[int, _Record] = OrderedDict()
        self._open: dict[int, _Record] = {}
        """Records that may still change."""
        self._last_tick = clock()
        self._is_done = False

    def stage(self, staged: Update, *, received: float) -> None:
        """Record a verified publish that is about to be handed to the fleet. `received`: when its last byte arrived, by
        the tracker's clock.
        """
        with self._lock:
            record = _Record(update=staged, received=received)
            self._records[staged.version] = self._open[staged.version] = record
            if len(self._records) > MOST_UPDATES:
                oldest, _ = self._records.popitem(last=False)
                self._open.pop(oldest, None)

    def withdraw(self, version: int) -> None:
        """Remove a publish that the fleet refused."""
        with self._lock:
            self._records.pop(version, None)
            self._open.pop(version, None)

    def warn(self, version: int, warning: str) -> None:
        """Attach a warning to a publish that remains valid."""
        with self._lock:
            if (record := self._records.get(version)) is not None:
                record.change(warning=warning)

    def hand_over(self, receipt: WorkerReceipts, *, distribute_ms: float) -> Update:
        """Record that the fleet has the weights. Receipts that arrived before are kept. Returns the update so far."""
        with self._changing() as records:
            record = self._records[receipt.version]
            record.handed_over = self.clock()
            timings = record.update.timings.model_copy(update={"distribute_ms": distribute_ms})
            record.change(state="applying", timings=timings)
            for name in receipt.waiting:
                if name not in record.receipts:
                    record.mark(name, "waiting")
            for name in receipt.applied:
                self._acknowledge(record, name, receipt.version)
            for name, why in receipt.refused.items():
                record.mark(name, "refused", error=why)
            for other in records:
                covers = set(other.update.models) <= set(record.update.models)
                if other.update.version < record.update.version and other.update.state not in FINAL_STATES and covers:
                    other.change(state="superseded", superseded_by=record.update.version)
        with self._lock:
            return record.describe()

    def acknowledged(self, worker: str, version: int) -> None:
        """A worker uses this version."""
        # An update that is already applied still counts workers that join with its version.
        with self._changing(version) as records:
            for record in records:
                if record.update.version <= version:
                    self._acknowledge(record, worker, version)

    def refused(self, worker: str, version: int, reason: str) -> None:
        """A worker refused a version."""
        with self._changing(version) as records:
            for record in records:
                if record.update.version == version:
                    record.mark(worker, "refused", error=reason)

    def lost(self, worker: str) -> None:
        """Stop waiting for a lost worker; its replacement acknowledges instead."""
        with self._changing() as records:
            for record in records:
                receipt = record.receipts.get(worker)
                if receipt is not None and receipt.state == "waiting":
                    record.mark(worker, "lost")

    def tick(self, *, can_apply: bool, is_done: bool = False) -> None:
        """Advance time. `can_apply`: False while paused: workers reach no batch boundary and are not late. `is_done`:
        an update that no worker is left to apply counts as applied.
        """
        now = self.clock()
        self._is_done = is_done
        elapsed, self._last_tick = now - self._last_tick, now
        with self._changing() as records:
            for record in records if can_apply else ():
                record.waited_s += elapsed

    def find(self, version: int) -> Update | None:
        with self._lock:
            record = self._records.get(version)
            return None if record is None else record.describe()

    def state_of(self, version: int) -> UpdateState | None:
        """State of an update; None if there is no such update. Lock-free: long polls call it at each notification."""
        record = self._records.get(version)
        return None if record is None else record.update.state

    def newest(self, most: int) -> tuple[Update, ...]:
        """The newest updates without their receipts, newest first."""
        with self._lock:
            return tuple(
                record.describe(with_receipts=False) for record in islice(reversed(self._records.values()), most)
            )

    # -- inside the lock ---------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self, version: int = 0) -> Iterator[list[_Record]]:
        """Every open record, and the applied record of `version`. Their states are updated after the block, and
        `on_result` is called without the lock.
        """
        with self._lock:
            records = [*self._open.values()]
            if version not in self._open and (named := self._records.get(version)) is not None:
                records += [named] if named.update.state == "applied" else []
            before = [record.update.state for record in records]
            yield records
            for record in records:
                self._judge(record)
                if record.update.state in _OVER:
                    self._open.pop(record.update.version, None)
            changed = [record for record, state in zip(records, before, strict=True) if record.update.state != state]
            ended = [record.describe() for record in changed if record.update.state != "applying"]
        for update in ended:
            self._on_result(update)
        if ended:
            self.notifier.notify()

    def _acknowledge(self, record: _Record, worker: str, version: int) -> None:
        before = record.receipts.get(worker)
        if before is not None and before.state == "applied":
            return
        latency_ms = max(0.0, (self.clock() - record.received) * 1000)
        record.mark(worker, "applied", version=version, error="", latency_ms=latency_ms)
        record.slowest_ms = max(record.slowest_ms or 0.0, latency_ms)

    def _judge(self, record: _Record) -> None:
        workers, waiting = record.workers, record.counts["waiting"]
        acked, total = workers.acked, workers.total
        is_late = record.waited_s >= self.apply_within_s
        if record.update.state in ("staged", *_OVER):
            return
        if acked == total and (acked or self._is_done):
            apply_ms = max(0.0, (self.clock() - record.handed_over) * 1000)
            timings = record.update.timings.model_copy(update={"apply_ms": apply_ms})
            record.change(state="applied", error="", applied_at=datetime.now(UTC), timings=timings)
        elif acked and (is_late or not waiting):
            record.change(state="partially_applied")
        elif not acked and record.update.state != "failed" and (is_late or (total and not waiting)):
            reasons = "; ".join(sorted({r.error for r in record.receipts.values() if r.error}))
            silence = f"no worker acknowledged version {record.update.version} within {self.apply_within_s:.0f} s"
            record.change(state="failed", error=reasons or f"{silence}; see GET /v1/workers")


def update_id(version: int) -> str:
    """The id of the update that published a version; the same after a restart of the head."""
    return f"u{version}"


def version_of(text: str) -> int:
    """The version of an update id; 0 for other text."""
    version = int(text[1:]) if text[1:].isdecimal() and len(text) <= 20 else 0
    return version if text == update_id(version) else 0
