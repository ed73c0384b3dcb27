"""The head of one job: what routes use, assembled over a fleet.

Starting (no fleet yet: 503) -> Running <-> Paused -> Completing -> Completed
                                   |-> Draining (SIGTERM, POST /v1/drain)
                                   |-> Failed (the fleet cannot continue)
"""

import asyncio
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count, islice
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog

from cormorant_api.control.journal import Journal
from cormorant_api.control.leases import PauseKeeper
from cormorant_api.control.metrics import HeadMetrics, RateWindow
from cormorant_api.errors import ApiError, HeadFault
from cormorant_api.http.bodies import UploadRoom
from cormorant_api.http.tokens import HeadTokens
from cormorant_api.ledger import BatchFeeder, Ledger
from cormorant_api.notifier import EventRing
from cormorant_api.settings import HeadSettings
from cormorant_api.weights.publisher import WeightPublisher
from cormorant_api.weights.store import WeightStore
from cormorant_api.weights.updates import UpdateTracker
from cormorant_contract.job import CollectorJob
from cormorant_contract.rest.control import DesiredReport
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.updates import Update
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet.events import FleetEvent
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.stats import FleetStats
from cormorant_worker.logs import LogContext
from cormorant_worker.normalize import Statistics
from cormorant_worker.weights.cached import Settled

if TYPE_CHECKING:
    from cormorant_api.traces import Traces

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")
_TICK_S = 0.5
_WORKERS_A_SECOND = 1000
"""Workers whose rates housekeeping samples per second: its cost does not grow with the fleet."""
_NEXT_HEAD_S = 2.0
"""Retry-After for clients that should reach the next head."""
_OVERLOADED_S = 1.0
_OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_WEIGHTS_OWNER = "cormorant-weights"
"""Owner of the pause lease of a head that waits for weights."""


class Threads:
    """A pool of threads for blocking calls, off the event loop. `waiting`: longest queue; further calls are refused."""

    def __init__(self, head: "Head", most: int, *, waiting: int, name: str) -> None:
        self._head, self.pool = head, ThreadPoolExecutor(most, thread_name_prefix=name)
        self._full = f"the head's {name} threads have {most} calls under way and {waiting} waiting, the limit; retry"
        self._room = threading.Semaphore(most + waiting)

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._head.refuse_while_closing()
        if not self._room.acquire(blocking=False):
            raise ApiError(ProblemType.OVERLOADED, self._full, retry_after_s=_OVERLOADED_S)
        try:
            asked = self.pool.submit(call, *args, **kwargs)
        except RuntimeError:  # the pool was shut down in the meantime, or no thread can be started
            self._room.release()
            self._head.refuse_while_closing()
            raise
        asked.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(asked)


class GroupSizes:
    """The latest size of each group that the operator requested. Thread-safe."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        """Guards the fields below, and keeps the fleet's order of requests."""
        self.groups = {name: group.desired for name, group in fleet.stats(workers=False).groups.items()}
        self._empty: dict[str, tuple[int, ...]] = {}
        """Slots in which no worker is expected, by group; groups without such slots are left out."""

    def want(self, groups: Mapping[str, int], *, empty_slots: Mapping[str, Collection[int]]) -> None:
        """Request sizes; other groups keep theirs. `empty_slots`: skipped indices; groups that are missing there skip
        none.
        """
        with self._lock:
            if unknown := sorted(set(groups) - set(self.groups)):
                raise ApiError(
                    ProblemType.INVALID_REQUEST,
                    f"unknown worker group {', '.join(unknown)}; the job has {', '.join(self.groups)}",
                    known=tuple(self.groups),
                )
            wanted = self.groups | dict(groups)
            if not any(wanted.values()):
                raise ApiError(ProblemType.LAST_WORKER, "no worker would be left; to pause the job, POST /v1/pauses")
            asked = {name: tuple(sorted(set(indices))) for name, indices in empty_slots.items() if indices}
            empty = {name: indices for name, indices in self._empty.items() if name not in groups} | asked
            slots = dict[str, tuple[int, ...]]()
            for name, size in wanted.items():
                # The lowest free indices, because a size alone would keep a gap: 2 workers and slot 0 empty are (1, 2).
                free = (index for index in count() if index not in empty.get(name, ()))
                slots[name] = tuple(islice(free, size))
            self._fleet.resize(slots, wait=False)
            self.groups, self._empty = wanted, empty

    def describe(self, stats: FleetStats, *, paused: bool) -> DesiredReport:
        """The report for the operator; `paused` is the current `spec.paused`."""
        with self._lock:
            return DesiredReport(
                groups=self.groups,
                paused=paused,
                pending=stats.retiring > 0,
                empty_slots=self._empty,
            )


class Running:
    """The parts of a head that need a fleet."""

    def __init__(self, head: "Head", fleet: WorkerFleet, *, is_paused: bool) -> None:
        settings = head.settings
        self.fleet = fleet
        self.settled_apart = head.journal.frames
        """Settled frames that neither the ledger nor `fleet.inherited_frames` counts."""
        self.ledger: Ledger = Ledger(
            epoch=head.epoch,
            ack_within_s=settings.ack_within_s,
            on_settled=lambda frames: head.journal.settle(
                self.settled_apart + fleet.inherited_frames + frames, self.statistics
            ),
            traces=head.traces,
        )
        self.feeder = BatchFeeder(fleet, self.ledger)
        self.updates = UpdateTracker(apply_within_s=settings.apply_within_s, on_result=head.update_ended)
        self.publisher = WeightPublisher(fleet, head.store, self.updates, head.events, head.traces)
        self.pauses = PauseKeeper(
            pause=fleet.pause, resume=fleet.resume, spec_paused=head.job.spec.paused, starts_paused=is_paused
        )
        self.group_sizes = GroupSizes(fleet)

    @property
    def statistics(self) -> Statistics | None:
        """Normalization statistics of the settled frames; None without `normalize`."""
        return None if self.fleet.statistics is None else self.fleet.statistics.current


class Head:
    """One job's control plane. Created before the fleet; see `attach`. Methods may be called from any thread."""

    def __init__(self, job: CollectorJob, settings: HeadSettings, tokens: HeadTokens) -> None:
        """Open the directory; StoreError if it cannot be used."""
        self.job, self.settings, self.tokens = job, settings, tokens
        self.epoch = secrets.token_hex(4)
        """First part of every id that this head issues."""
        self.started_at = datetime.now(UTC)
        self.data_port = 0
        self.has_queue = job.spec.output.queue is not None
        """Consumers take batches here."""
        self.journal = Journal(
            settings.directory,
            epoch=settings.epoch,
            floor_frames=settings.floor_frames,
            termination_message_file=settings.termination_message_file,
        )
        self.store = WeightStore(settings.directory, keeps=settings.keep_versions, policy=job.spec.policy)
        self.events = EventRing(epoch=self.epoch)
        self.rates = RateWindow()
        self.metrics = HeadMetrics(job, floor_frames=self.journal.exported_frames)
        self.traces = open_traces(job=job.metadata.name, namespace=job.metadata.namespace)
        self.log_context = LogContext()
        """Fields of every log line of this process."""
        self.failure = ""
        """Why the fleet failed; empty otherwise."""
        self.end_state = ""
        """How this head ended, as the `ended` event says it; empty before."""
        self.watchers: list[Callable[[FleetStats], None]] = []
        """Called with the counters twice a second by the housekeeping thread; must be quick and not raise."""
        self.missing_weights = ""
        """Weights of earlier heads that this one lacks, and how it continues; empty: none are missing."""
        self._found_version = 0
        """Newest version of an earlier head that was restored at the start, from the store or from a worker."""
        self.is_draining = False
        self.is_closing = False
        self.uploads = UploadRoom(settings.max_body_bytes)
        self._running: Running | None = None
        self._resume_is_start = False
        """The fleet starts paused for `attach`, so its first resume is not an event."""
        self.quick = Threads(self, 4, waiting=256, name="control")
        """For short calls."""
        self.bulk = Threads(self, 16, waiting=256, name="bulk")
        """For long calls."""
        self.at_boundary = Threads(self, 2, waiting=64, name="boundary")
        """For calls that wait for workers. One that does not answer delays other calls of this pool, but no batch."""
        self.previews = Threads(self, 4, waiting=16, name="previews")
        """For previews: no more at a time, so that workers are not slowed."""
        self._ended = threading.Event()
        self._housekeeper = threading.Thread(target=self._keep_house, name="housekeeping", daemon=True)

    def attach(self, fleet: WorkerFleet, *, is_paused: bool) -> None:
        """Take over a started fleet. Weights of an earlier head are published before anything is collected.
        `is_paused`: the fleet was started paused; it resumes here unless a lease is held.
        """
        running = Running(self, fleet, is_paused=is_paused)
        self._resume_is_start = is_paused and not self.job.spec.paused
        fleet.subscribe(self._on_fleet_event)
        stats = fleet.stats(workers=False)
        self.sample(stats)
        self.rates.sample(stats)
        if not running.publisher.inherit():
            running.publisher.restore()
        wanted = running.publisher.published_version = self.settings.published_version
        self._found_version = running.publisher.version
        if wanted > self._found_version and fleet.specs:
            # For a limited time, do not start with older weights than earlier heads had.
            within_s = self.settings.weights_within_s
            why = f"version {wanted} of the weights is not here"
            running.pauses.grant(_WEIGHTS_OWNER, reason=why, ttl_s=within_s)
            self._tell_missing(
                f"version {wanted} of the weights was lost with the earlier head; waiting for at most "
                f"{within_s:.0f} s for a worker that kept it or a learner that publishes"
            )
        self._running = running
        if self.has_queue:
            running.feeder.start()
        running.pauses.start()
        self._housekeeper.start()

    def _find_weights(self, running: Running) -> None:
        """End the pause once newer weights arrive; report an expired pause without them."""
        if not self.missing_weights:
            return
        newest = running.publisher.version
        if newest > self._found_version or newest >= self.settings.published_version:
            self.missing_weights = ""
            running.pauses.end_of(_WEIGHTS_OWNER)
        elif all(lease.owner != _WEIGHTS_OWNER for lease in running.pauses.held()):
            acting = f"version {self._found_version}" if self._found_version else "the policy's initial weights"
            self._tell_missing(
                f"frames are collected with {acting}: version {self.settings.published_version} was lost with the "
                "earlier head; publish weights, and set head.persistence.claimName to keep them"
            )

    def _tell_missing(self, reason: str) -> None:
        if reason != self.missing_weights:
            self.missing_weights = reason
            self.events.add("weights_missing", version=self.settings.published_version, reason=reason)
            log.warning("weights_missing", version=self.settings.published_version, reason=reason)

    def drain(self) -> None:
        """Start no new batches and finish the open ones. Requests are served as before."""
        if self.is_draining:
            return
        self.is_draining = True
        self.events.add("draining")
        if self._running is not None:
            self._running.fleet.drain()
            # A paused fleet could not finish its open batches.
            self._running.pauses.overrule()

    def close(self) -> None:
        """End every wait and return all loans. Does not close the fleet. May be called twice."""
        self._ended.set()
        # Housekeeping must stop before unacknowledged loans are returned: it would count them as settled.
        if self._housekeeper.is_alive():
            self._housekeeper.join(timeout=5)
        self._add_end_event()
        if self._running is not None and not self.is_closing:
            with suppress(CormorantError):  # the fleet is gone: the last numbers stay
                stats = self._running.fleet.stats()
                self.rates.sample(stats)
                for watch in self.watchers:
                    watch(stats)
        self.is_closing = True  # event streams send their remaining events and end
        if self._running is not None:
            self._running.pauses.close()
            self._running.feeder.close()
            self._running.ledger.close()
            self._running.updates.notifier.notify()
            self._running.pauses.notifier.notify()
        self.events.notifier.notify()
        for threads in (self.quick, self.bulk, self.at_boundary, self.previews):
            threads.pool.shutdown(wait=False, cancel_futures=True)
        self.journal.close()
        if self.traces is not None:
            self.traces.close()

    @property
    def running(self) -> Running:
        """The parts that need a fleet; 503 before the first worker has started."""
        if self._running is None:
            raise ApiError(ProblemType.NO_WORKERS, "the first worker has not started yet; retry", retry_after_s=2)
        return self._running

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def settled_frames(self, stats: FleetStats) -> int:
        """Frames of this and earlier heads that no later head collects again, by these counters. Never waits for the
        disk.
        """
        # A closing head returns unacknowledged loans, which the fleet then counts as settled.
        new = 0 if self.is_closing else stats.settled_frames
        return max(self.journal.settled_frames, new)

    def keep_settled_frames(self, stats: FleetStats) -> None:
        """Record the settled frames for the next head."""
        self.journal.settle(self.settled_frames(stats))

    @property
    def receipt(self) -> str:
        """Signed count of settled frames, which a consumer hands to the next head; empty without a token to sign it."""
        told = f"{self.journal.epoch}.{self.journal.settled_frames}"
        return f"{told}.{signature}" if (signature := self._sign(told)) else ""

    def inherit(self, receipt: str) -> None:
        """Count the frames in a receipt that an earlier head of this job gave a consumer: without pods, only the
        consumer has this count. Ignores text that is not such a receipt.
        """
        told, _, signature = receipt.rpartition(".")
        wanted = self._sign(told)
        if not wanted or not hmac.compare_digest(signature.encode(), wanted.encode()):
            log.info("receipt_ignored", reason=f"{receipt[:80]!r} is not a receipt of this job's heads")
            return
        epoch, frames = map(int, told.split("."))
        fleet = self.running.fleet
        fleet.inherit(Settled(epoch=epoch, frames=frames))  # ignores those of this head and of later ones
        self.keep_settled_frames(fleet.stats(workers=False))

    def _sign(self, told: str) -> str:
        about = self.job.metadata
        return self.tokens.sign(f"settled {about.namespace}/{about.name} {told}")

    def keep_restored(self) -> None:
        """Record the epoch, the count and the statistics of a restored fleet, and continue counting from them;
        StoreError if they could not be written.
        """
        running = self.running
        self.journal.reserve_epoch(running.fleet.epoch)
        # In this order: an acknowledgement between the two must not count twice.
        stats, counts = running.fleet.stats(workers=False), running.ledger.counts()
        counted = counts.acked_frames + counts.stale_frames + running.fleet.inherited_frames
        running.settled_apart = stats.settled_frames - counted
        self.journal.await_write(self.journal.settle(self.settled_frames(stats), running.statistics))

    @property
    def is_complete(self) -> bool:
        """Whether all frames are collected, delivered and acknowledged. Raises the fleet's error if it failed."""
        running = self._running
        if running is None:
            return False
        if running.feeder.error is not None:
            raise running.feeder.error
        return running.fleet.is_done and (not self.has_queue or running.ledger.has_ended)

    async def stats(self, *, workers: bool = True) -> FleetStats:
        """The fleet's counters; `workers=False` omits the workers and is O(1)."""
        return await self.quick(self.running.fleet.stats, workers=workers)

    def refuse_while_closing(self, *, or_draining: bool = False) -> None:
        """Raise 503 while shutting down, or already while draining. Publishing stays allowed then: a learner that
        waited for the next head would not take this head's last batches.
        """
        if self.is_closing or (or_draining and self.is_draining):
            what = "shutting down" if self.is_closing else "draining"
            why = f"the head is {what}; retry with the next head"
            raise ApiError(ProblemType.DRAINING, why, retry_after_s=_NEXT_HEAD_S)

    def _on_fleet_event(self, event: FleetEvent) -> None:
        """Called by the fleet's thread; must be quick and not call the fleet."""
        if self._ended.is_set():
            return
        running = self._running
        if running is not None:
            if event.kind == "applied":
                running.updates.acknowledged(event.worker, event.version)
            elif event.kind == "refused":
                running.updates.refused(event.worker, event.version, event.reason)
            elif event.kind == "worker_lost":
                running.updates.lost(event.worker)
        self.metrics.fleet.on_fleet_event(event)
        if event.kind == "published":
            self.log_context.version = event.version
        if event.kind == "accepted":
            self.metrics.batches["queue"].inc()
        if event.kind in ("sealed", "published", "refused", "lent"):
            return  # too frequent for the event ring, or already added by the publisher with the update's id
        if event.kind in ("paused", "resumed"):
            is_start, self._resume_is_start = self._resume_is_start, False
            if event.kind == "resumed" and is_start:
                return
        if event.kind == "failed" and not event.worker:
            self.failure = event.reason
        self.events.add(
            event.kind, worker=event.worker, version=event.version, frames=event.frames, reason=event.reason
        )

    def update_ended(self, update: Update) -> None:
        """Report a publish that was applied, failed, is late or was superseded."""
        self.metrics.update_ended(update)
        if self.traces is not None:
            self.traces.update_ended(update)
        self.events.add(
            "update", update_id=update.update_id, version=update.version, state=update.state, reason=update.error
        )
        if update.state in ("failed", "partially_applied"):
            log.warning("weights_not_applied", version=update.version, state=update.state, reason=update.error)

    def _add_end_event(self) -> None:
        """Add the last event, once."""
        if self.end_state:
            return
        stats = None if self._running is None else self._running.fleet.stats(workers=False)
        try:
            # A drained head is complete, too; the job is not.
            is_over = stats is not None and stats.is_collected and self.is_complete
            self.end_state = "Failed" if self.failure else "Completed" if is_over else "Stopped"
        except CormorantError as error:
            self.end_state, self.failure = "Failed", str(error)
        self.events.add("ended", state=self.end_state, frames=stats.frames if stats else 0, reason=self.failure)

    def sample(self, stats: FleetStats) -> None:
        exported = self.journal.note_exported(stats.frames)
        self.metrics.fleet.sample(replace(stats, frames=min(stats.frames, exported)))

    def _keep_house(self) -> None:
        running = self.running
        has_told_error, workers_at = "", 0.0
        while not self._ended.wait(_TICK_S):
            try:
                with_workers = time.monotonic() >= workers_at
                stats = running.fleet.stats(workers=with_workers)
                if with_workers:
                    workers_at = time.monotonic() + max(1.0, len(stats.workers) / _WORKERS_A_SECOND)
                self.rates.sample(stats)
                self.sample(stats)
                self.keep_settled_frames(stats)
                # Workers join one by one; one that joins may have kept newer weights than these.
                if not self.is_draining and running.publisher.inherit():
                    self._found_version = running.publisher.version
                self._find_weights(running)
                has_workers = any(group.ready or group.starting for group in stats.groups.values())
                is_done = running.fleet.is_done
                running.updates.tick(
                    can_apply=running.pauses.state == "running" and has_workers, is_done=is_done and not has_workers
                )
                is_over = is_done and stats.queued_batches == 0
                if self.has_queue and is_over and not running.ledger.is_exhausted:
                    running.feeder.probe()
                if self.is_complete:
                    self._add_end_event()
                for watch in self.watchers:
                    watch(stats)
            except CormorantError as error:
                # The main thread raises the same error and ends the process.
                self.failure = self.failure or str(error)
            except Exception as error:
                # Keep the thread alive: a disk that is full now may have room at the next tick.
                if str(error) != has_told_error:
                    log.exception("housekeeping_failed", reason=f"{type(error).__name__}: {error}")
                has_told_error = str(error)
            else:
                has_told_error = ""


def open_traces(*, job: str, namespace: str) -> "Traces | None":
    """The traces that the OTEL_* variables ask for; HeadFault if their packages are not installed."""
    if not any(map(os.environ.get, _OTLP_ENDPOINTS)) or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    try:
        from cormorant_api.traces import Traces
    except ImportError as error:
        raise HeadFault(
            f"the OTEL_* variables ask for traces, but {error.name} is not installed; install cormorant[otel], or set "
            "OTEL_TRACES_EXPORTER=none"
        ) from None
    return Traces(job=job, namespace=namespace)
