"""Tracks each publish by the receipts of the workers. See `rest/updates.py` for the states.

A receipt costs O(1) in workers and updates: records count their receipts, and only open records are visited.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice

from cormorant_api.notifier import AsyncNotifier
from cormorant_contract.rest.headers import make_etag
from cormorant_contract.rest.updates import (
    FINAL_STATES,
    ModelUpdate,
    ReceiptState,
    Update,
    UpdateReceipt,
    UpdateState,
    UpdateSummary,
    UpdateTimings,
    WorkerCounts,
)

MOST_UPDATES = 1000
MOST_WITH_RECEIPTS = 20
"""Updates that keep their receipts; older finished ones keep only the counts."""
_OVER = frozenset({"superseded", "applied"})
"""Failed updates stay open: a late worker may still apply them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRecord:
    """A publish before it is handed to the fleet."""

    version: int
    digest: str
    """Digest of the request body."""
    size_bytes: int
    models: Mapping[str, ModelUpdate]
    received: float
    """When the last byte arrived, by the tracker's clock."""
    receive_ms: float = 0.0
    verify_ms: float = 0.0


@dataclass(slots=True)
class _Receipt:
    state: ReceiptState = "waiting"
    version: int = 0
    latency_ms: float | None = None
    error: str = ""


@dataclass(slots=True, kw_only=True)
class _Record:
    published: PublishRecord
    state: UpdateState = "staged"
    receipts: dict[str, _Receipt] = field(default_factory=dict)
    counts: dict[ReceiptState, int] = field(
        default_factory=lambda: {"waiting": 0, "applied": 0, "refused": 0, "lost": 0}
    )
    """Number of receipts by state."""
    slowest_ms: float | None = None
    warning: str = ""
    staged_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    applied_at: datetime | None = None
    superseded_by: int | None = None
    error: str = ""
    distribute_ms: float = 0.0
    apply_ms: float | None = None
    handed_over: float = 0.0
    waited_s: float = 0.0
    """Unpaused time since the publish."""

    @property
    def total(self) -> int:
        """Receipts without those of lost workers."""
        return sum(self.counts.values()) - self.counts["lost"]

    def mark(self, worker: str, state: ReceiptState) -> _Receipt:
        receipt = self.receipts.get(worker)
        if receipt is None:
            receipt = self.receipts[worker] = _Receipt()
        else:
            self.counts[receipt.state] -= 1
        receipt.state = state
        self.counts[state] += 1
        return receipt


class UpdateTracker:
    """The last 1000 updates of this head. Thread-safe."""

    def __init__(
        self,
        *,
        apply_within_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_result: Callable[[Update], None] | None = None,
    ) -> None:
        """Make a tracker.

        Args:
            apply_within_s: unpaused seconds after which a worker is late.
            on_result: called when an update is applied, late, failed or superseded; without receipts.
        """
        self._on_result = on_result or (lambda _: None)
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

    # -- what happens ------------------------------------------------------------------------------------------

    def stage(self, published: PublishRecord) -> None:
        """Record a verified publish that is about to be handed to the fleet."""
        with self._lock:
            self._records[published.version] = self._open[published.version] = _Record(published=published)
            while len(self._records) > MOST_UPDATES:
                oldest, _ = self._records.popitem(last=False)
                self._open.pop(oldest, None)
            for record in islice(self._records.values(), max(0, len(self._records) - MOST_WITH_RECEIPTS)):
                if record.receipts and record.state in FINAL_STATES:
                    record.receipts.clear()
                    self._open.pop(record.published.version, None)

    def withdraw(self, version: int) -> None:
        """Remove a publish that the fleet refused."""
        with self._lock:
            self._records.pop(version, None)
            self._open.pop(version, None)

    def warn(self, version: int, warning: str) -> None:
        """Attach a warning to a publish that remains valid."""
        with self._lock:
            if (record := self._records.get(version)) is not None:
                record.warning = warning

    def hand_over(
        self,
        version: int,
        *,
        applied: Iterable[str],
        waiting: Iterable[str],
        refused: Mapping[str, str] | None = None,
        distribute_ms: float,
    ) -> None:
        """The fleet took it: workers that applied it already, have it staged, or refused it."""
        ended: list[Update] = []
        with self._lock:
            record = self._records[version]
            record.handed_over, record.distribute_ms = self.clock(), distribute_ms
            if record.state == "staged":
                record.state = "applying"
            for name in waiting:
                if name not in record.receipts:
                    record.mark(name, "waiting")
            for name in applied:
                self._acknowledge(record, name, version)
            for name, why in (refused or {}).items():
                _refuse(record, name, why)
            for other in tuple(self._open.values()):
                covers = set(other.published.models) <= set(record.published.models)
                if other.published.version < version and other.state not in FINAL_STATES and covers:
                    other.state, other.superseded_by = "superseded", version
                    self._note_end(other, ended)
            before = record.state
            self._judge(record)
            if record.state != before:
                self._note_end(record, ended)
        self._tell(ended)

    def acknowledged(self, worker: str, version: int) -> None:
        """A worker acts with this version."""

        def note(record: _Record) -> None:
            if record.published.version <= version:
                self._acknowledge(record, worker, version)

        # An update that is already applied still counts workers that join with its version.
        self._change(note, version)

    def refused(self, worker: str, version: int, reason: str) -> None:
        """A worker refused a version."""

        def note(record: _Record) -> None:
            if record.published.version == version:
                _refuse(record, worker, reason)

        self._change(note, version)

    def lost(self, worker: str) -> None:
        """Stop waiting for a lost worker; its replacement acknowledges instead."""

        def note(record: _Record) -> None:
            receipt = record.receipts.get(worker)
            if receipt is not None and receipt.state == "waiting":
                record.mark(worker, "lost")

        self._change(note)

    def tick(self, *, can_apply: bool) -> None:
        """Advance time. Call it about every second.

        Args:
            can_apply: False while paused: workers reach no batch boundary and are not late.
        """
        now = self.clock()
        elapsed, self._last_tick = now - self._last_tick, now

        def note(record: _Record) -> None:
            if can_apply:
                record.waited_s += elapsed

        self._change(note)

    # -- looking -----------------------------------------------------------------------------------------------

    def find(self, version: int) -> Update | None:
        with self._lock:
            record = self._records.get(version)
            return None if record is None else _describe(record)

    def glance(self, version: int) -> UpdateSummary | None:
        """An update without receipts; O(1) in workers."""
        with self._lock:
            record = self._records.get(version)
            return None if record is None else _summarize(record)

    def is_over(self, version: int) -> bool:
        """Whether an update is final. Lock-free: every long poll asks at every notification."""
        record = self._records.get(version)
        return record is not None and record.state in FINAL_STATES

    def published_as(self, version: int) -> PublishRecord | None:
        """The publish of a version; None if it is not tracked any more."""
        record = self._records.get(version)
        return None if record is None else record.published

    def newest(self, most: int) -> tuple[UpdateSummary, ...]:
        """Summaries of the newest updates, newest first."""
        with self._lock:
            return tuple(_summarize(record) for record in islice(reversed(self._records.values()), most))

    # -- inside the lock ---------------------------------------------------------------------------------------

    def _change(self, note: Callable[[_Record], None], version: int = 0) -> None:
        """Apply `note` to every open record, and to the applied record of `version`."""
        ended: list[Update] = []
        with self._lock:
            records = [*self._open.values()]
            if version not in self._open and (named := self._records.get(version)) is not None:
                records += [named] if named.state == "applied" and named.receipts else []
            for record in records:
                before = record.state
                note(record)
                if before != "staged":
                    self._judge(record)
                if record.state != before:
                    self._note_end(record, ended)
        self._tell(ended)

    def _note_end(self, record: _Record, ended: list[Update]) -> None:
        if record.state in _OVER:
            self._open.pop(record.published.version, None)
        ended.append(_describe(record, with_receipts=False))

    def _tell(self, ended: list[Update]) -> None:
        for update in ended:
            self._on_result(update)
        if ended:
            self.notifier.notify()

    def _acknowledge(self, record: _Record, worker: str, version: int) -> None:
        receipt = record.receipts.get(worker)
        if receipt is not None and receipt.state == "applied":
            return
        receipt = record.mark(worker, "applied")
        receipt.version, receipt.error = version, ""
        receipt.latency_ms = max(0.0, (self.clock() - record.published.received) * 1000)
        record.slowest_ms = max(record.slowest_ms or 0.0, receipt.latency_ms)

    def _judge(self, record: _Record) -> None:
        acked, waiting = record.counts["applied"], record.counts["waiting"]
        is_late = record.waited_s >= self.apply_within_s
        if record.state in ("superseded", "applied"):
            return
        if acked and acked == record.total:
            record.state, record.error = "applied", ""
            record.applied_at = datetime.now(UTC)
            record.apply_ms = max(0.0, (self.clock() - record.handed_over) * 1000)
        elif acked and (is_late or not waiting):
            record.state = "partially_applied"
        elif not acked and record.state != "failed" and (is_late or (record.total and not waiting)):
            record.state = "failed"
            reasons = sorted({r.error for r in record.receipts.values() if r.error})
            record.error = "; ".join(reasons) or (
                f"no worker acknowledged version {record.published.version} within {self.apply_within_s:.0f} s; "
                "see GET /v1/workers"
            )


def _refuse(record: _Record, worker: str, reason: str) -> None:
    record.mark(worker, "refused").error = reason


def update_id(version: int) -> str:
    """The id of the update that published a version; the same after a restart of the head."""
    return f"u{version}"


def version_of(text: str) -> int | None:
    """The version of an update id; None for other text."""
    digits = text[1:]
    is_id = text.startswith("u") and digits.isascii() and digits.isdigit() and len(digits) <= 19
    return int(digits) if is_id and str(int(digits)) == digits else None


def historic_update(published: PublishRecord, *, staged_at: datetime) -> Update:
    """The update of a version that an earlier head published: its receipts are not known any more."""
    return _describe(_Record(published=published, state="superseded", staged_at=staged_at))


def _summarize(record: _Record) -> UpdateSummary:
    published = record.published
    return UpdateSummary(
        update_id=update_id(published.version),
        version=published.version,
        state=record.state,
        models=tuple(sorted(published.models)),
        bytes=published.size_bytes,
        workers=_counts_of(record),
        staged_at=record.staged_at,
        slowest_ms=record.slowest_ms,
        superseded_by=record.superseded_by,
        error=record.error,
    )


def _counts_of(record: _Record) -> WorkerCounts:
    return WorkerCounts(total=record.total, acked=record.counts["applied"], failed=record.counts["refused"])


def _describe(record: _Record, *, with_receipts: bool = True) -> Update:
    published = record.published
    receipts = tuple(
        UpdateReceipt(worker=name, **asdict(receipt))
        for name, receipt in (sorted(record.receipts.items()) if with_receipts else ())
    )
    return Update(
        update_id=update_id(published.version),
        model=min(published.models),
        models=dict(published.models),
        version=published.version,
        digest=published.digest,
        etag=make_etag(published.version, published.digest),
        bytes=published.size_bytes,
        tensors=sum(model.tensors for model in published.models.values()),
        state=record.state,
        workers=_counts_of(record),
        receipts=receipts,
        superseded_by=record.superseded_by,
        error=record.error,
        warning=record.warning,
        staged_at=record.staged_at,
        applied_at=record.applied_at,
        timings=UpdateTimings(
            receive_ms=published.receive_ms,
            verify_ms=published.verify_ms,
            distribute_ms=record.distribute_ms,
            apply_ms=record.apply_ms,
        ),
    )
