"""What became of each publish: receipts by worker, fed by the fleet's events. See `rest/updates.py` for the states."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice

from cormorant_api.bell import Bell
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What is known of a publish before the fleet has it."""

    version: int
    model: str
    digest: str
    """Of the request's body."""
    size_bytes: int
    models: Mapping[str, ModelUpdate]
    received: float
    """When the last byte had come, by the tracker's clock."""
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
    published: Published
    state: UpdateState = "staged"
    receipts: dict[str, _Receipt] = field(default_factory=dict)
    staged_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    applied_at: datetime | None = None
    superseded_by: int | None = None
    error: str = ""
    distribute_ms: float = 0.0
    apply_ms: float | None = None
    handed_over: float = 0.0
    waited_s: float = 0.0
    """Time in which workers could have acknowledged."""


class UpdateTracker:
    """Every update of this head, newest 1000. Thread-safe."""

    def __init__(
        self,
        *,
        apply_within_s: float,
        bell: Bell,
        clock: Callable[[], float] = time.monotonic,
        on_result: Callable[[Update], None] | None = None,
    ) -> None:
        """Make a tracker.

        Args:
            apply_within_s: a worker that has not acknowledged after so long of running time is late.
            bell: rung at every change.
            clock: seconds, never going back.
            on_result: called whenever an update has come to a result: applied, late, failed, superseded.
        """
        self._on_result = on_result or _ignore
        self.apply_within_s = apply_within_s
        self.bell = bell
        self.clock = clock
        self._lock = threading.Lock()
        """Guards everything below."""
        self._records: OrderedDict[int, _Record] = OrderedDict()
        self._last_tick = clock()

    # -- what happens ------------------------------------------------------------------------------------------

    def stage(self, published: Published) -> None:
        """A publish was verified and kept, and will be handed to the fleet now."""
        with self._lock:
            self._records[published.version] = _Record(published=published)
            while len(self._records) > MOST_UPDATES:
                self._records.popitem(last=False)

    def withdraw(self, version: int) -> None:
        """The fleet refused it: it never was."""
        with self._lock:
            self._records.pop(version, None)

    def hand_over(
        self,
        version: int,
        *,
        applied: Iterable[str],
        waiting: Iterable[str],
        refused: Mapping[str, str] | None = None,
        distribute_ms: float,
    ) -> None:
        """The fleet has it: these workers act with it already, these have it staged, these refused it."""
        ended: list[Update] = []
        with self._lock:
            record = self._records[version]
            record.handed_over, record.distribute_ms = self.clock(), distribute_ms
            if record.state == "staged":
                record.state = "applying"
            for name in waiting:
                record.receipts.setdefault(name, _Receipt())
            for name in applied:
                self._acknowledge(record, name, version)
            for name, why in (refused or {}).items():
                _refuse(record, name, why)
            for other in self._records.values():
                covers = set(other.published.models) <= set(record.published.models)
                if other.published.version < version and other.state not in FINAL_STATES and covers:
                    other.state, other.superseded_by = "superseded", version
                    ended.append(_describe(other))
            before = record.state
            self._judge(record)
            if record.state != before:
                ended.append(_describe(record))
        self._tell(ended)

    def acknowledged(self, worker: str, version: int) -> list[Update]:
        """A worker acts with a version from now on. Returns the updates that this ended."""

        def note(record: _Record) -> None:
            # What was applied everywhere counts those that join with it, and not what came after it.
            if record.state != "applied" or record.published.version == version:
                self._acknowledge(record, worker, version)

        return self._change(note, up_to=version)

    def refused(self, worker: str, version: int, reason: str) -> list[Update]:
        """A worker could not take a version. Returns the updates that this ended."""

        def note(record: _Record) -> None:
            if record.published.version == version:
                _refuse(record, worker, reason)

        return self._change(note)

    def lost(self, worker: str) -> list[Update]:
        """A worker is gone: nobody waits for it. Its replacement acknowledges in its stead."""

        def note(record: _Record) -> None:
            receipt = record.receipts.get(worker)
            if receipt is not None and receipt.state == "waiting":
                receipt.state = "lost"

        return self._change(note)

    def tick(self, *, can_apply: bool) -> list[Update]:
        """Time passes. Call it about every second.

        Args:
            can_apply: whether workers reach batch boundaries now; a paused fleet's do not, and are not late.

        Returns:
            Updates that time has ended.
        """
        now = self.clock()
        elapsed, self._last_tick = now - self._last_tick, now

        def note(record: _Record) -> None:
            if can_apply:
                record.waited_s += elapsed

        return self._change(note)

    # -- looking -----------------------------------------------------------------------------------------------

    def find(self, version: int) -> Update | None:
        """An update, as it is now."""
        with self._lock:
            record = self._records.get(version)
            return None if record is None else _describe(record)

    def ended(self, version: int) -> Update | None:
        """An update that will not change any more; None while it may."""
        update = self.find(version)
        return update if update is not None and update.state in FINAL_STATES else None

    def newest(self, most: int) -> tuple[UpdateSummary, ...]:
        """The newest updates at a glance, newest first."""
        with self._lock:
            return tuple(_summarize(record) for record in islice(reversed(self._records.values()), most))

    # -- inside the lock ---------------------------------------------------------------------------------------

    def _change(self, note: Callable[[_Record], None], *, up_to: int | None = None) -> list[Update]:
        ended: list[Update] = []
        with self._lock:
            for record in self._records.values():
                # A failed one is looked at again: a late worker may bring it round.
                if record.state == "superseded" or (up_to is not None and record.published.version > up_to):
                    continue
                before = record.state
                note(record)
                if before != "staged":
                    self._judge(record)
                if record.state != before:
                    ended.append(_describe(record))
        self._tell(ended)
        return ended

    def _tell(self, ended: list[Update]) -> None:
        for update in ended:
            self._on_result(update)
        self.bell.ring()

    def _acknowledge(self, record: _Record, worker: str, version: int) -> None:
        receipt = record.receipts.setdefault(worker, _Receipt())
        if receipt.state == "applied":
            return
        receipt.state, receipt.version, receipt.error = "applied", version, ""
        receipt.latency_ms = max(0.0, (self.clock() - record.published.received) * 1000)

    def _judge(self, record: _Record) -> None:
        states = [receipt.state for receipt in record.receipts.values() if receipt.state != "lost"]
        acked, waiting = states.count("applied"), states.count("waiting")
        is_late = record.waited_s >= self.apply_within_s
        if record.state in ("superseded", "applied"):
            return
        if acked and acked == len(states):
            record.state, record.error = "applied", ""
            record.applied_at = datetime.now(UTC)
            record.apply_ms = max(0.0, (self.clock() - record.handed_over) * 1000)
        elif acked and (is_late or not waiting):
            record.state = "partially_applied"
        elif not acked and (is_late or (states and not waiting)):
            record.state = "failed"
            reasons = sorted({r.error for r in record.receipts.values() if r.error})
            record.error = "; ".join(reasons) or (
                f"no worker acknowledged version {record.published.version} within {self.apply_within_s:.0f} s; "
                "GET /v1/workers says what they do"
            )


def _ignore(_: Update) -> None:
    return


def _refuse(record: _Record, worker: str, reason: str) -> None:
    receipt = record.receipts.setdefault(worker, _Receipt())
    receipt.state, receipt.error = "refused", reason


def update_id(version: int) -> str:
    """The id of the update that published a version; the same after a restart of the head."""
    return f"u{version}"


def version_of(text: str) -> int | None:
    """The version that an update id stands for; None for any other text."""
    digits = text[1:]
    is_id = text.startswith("u") and digits.isascii() and digits.isdigit() and len(digits) <= 19
    return int(digits) if is_id and str(int(digits)) == digits else None


def _summarize(record: _Record) -> UpdateSummary:
    published, states = record.published, [receipt.state for receipt in record.receipts.values()]
    return UpdateSummary(
        update_id=update_id(published.version),
        version=published.version,
        state=record.state,
        models=tuple(sorted(published.models)),
        bytes=published.size_bytes,
        workers=WorkerCounts(
            total=len(states) - states.count("lost"), acked=states.count("applied"), failed=states.count("refused")
        ),
        staged_at=record.staged_at,
        slowest_ms=max((r.latency_ms for r in record.receipts.values() if r.latency_ms is not None), default=None),
        superseded_by=record.superseded_by,
        error=record.error,
    )


def _describe(record: _Record) -> Update:
    published = record.published
    receipts = tuple(
        UpdateReceipt(
            worker=name,
            version=receipt.version,
            state=receipt.state,
            latency_ms=receipt.latency_ms,
            error=receipt.error,
        )
        for name, receipt in sorted(record.receipts.items())
    )
    counted = [receipt.state for receipt in receipts if receipt.state != "lost"]
    return Update(
        update_id=update_id(published.version),
        model=published.model,
        models=dict(published.models),
        version=published.version,
        digest=published.digest,
        etag=make_etag(published.version, published.digest),
        bytes=published.size_bytes,
        tensors=sum(model.tensors for model in published.models.values()),
        state=record.state,
        workers=WorkerCounts(total=len(counted), acked=counted.count("applied"), failed=counted.count("refused")),
        receipts=receipts,
        superseded_by=record.superseded_by,
        error=record.error,
        staged_at=record.staged_at,
        applied_at=record.applied_at,
        timings=UpdateTimings(
            receive_ms=published.receive_ms,
            verify_ms=published.verify_ms,
            distribute_ms=record.distribute_ms,
            apply_ms=record.apply_ms,
        ),
    )
