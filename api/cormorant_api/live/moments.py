"""State for live pages: one snapshot (moment) per second, serialized once for all listeners. `Recorder` takes them of a
fleet without a head, for the report of its run.

housekeeping thread --observe--> history
                                 moment -> bytes --notifier--> every `LiveStream`
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from statistics import quantiles

import yaml

from cormorant_api.head import Head
from cormorant_api.http.tokens import HeadTokens
from cormorant_api.live.previews import find_picture
from cormorant_api.live.report import make_report
from cormorant_api.notifier import Ring
from cormorant_api.settings import HeadSettings
from cormorant_api.status import describe, describe_worker
from cormorant_contract.job import CollectorJob
from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_contract.rest.base import Answer
from cormorant_contract.rest.live import Event, History, LogLine, Moment, Opening, Sample
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.stats import FleetStats
from cormorant_worker.logs import TAIL

_EVERY_S = 1.0
_SLACK_S = 0.2
"""`observe` is called about twice a second, not to the millisecond."""
_KEPT = 10
"""Moments kept for slow listeners."""
_MOST_EVENTS = 100
_MOST_UPDATES = 20
_WORKERS_A_SECOND = 100
_LEFT_OUT = frozenset({"accepted", "applied", "dropped"})
_FEWEST_FOR_A_BAND = 5


class Past:
    """Samples for the plots: one per second for the last 15 minutes, and at most 1,200 for the whole run. Not
    thread-safe; `sample` has one caller.
    """

    def __init__(self, *, fine: int = 900, coarse: int = 1200) -> None:
        """`fine`: number of newest samples to keep. `coarse`: most samples of the whole run, even; beyond it, every
        second one is dropped.
        """
        self._fine: deque[Sample] = deque(maxlen=fine)
        self._coarse: list[Sample] = []
        self._most_coarse = coarse
        self._stride, self._count = 1, 0
        self._spent: Mapping[str, float] | None = None

    def sample(self, stats: FleetStats, *, at: float, per_second: float) -> Sample:
        """The next sample, for `add`; `at` in seconds since 1970, `per_second` in frames."""
        low = high = None
        if len(returns := stats.recent.get(("return", ""), ())) >= _FEWEST_FOR_A_BAND:
            deciles = quantiles(returns, n=10, method="inclusive")
            low, high = deciles[0], deciles[-1]
        spent = {name: sum(group.spent_s.get(name, 0.0) for group in stats.groups.values()) for name in ACTIVITIES}
        before, self._spent = self._spent or spent, spent
        # The seconds of a replaced worker disappear from the sum.
        grown = {name: max(0.0, seconds - before[name]) for name, seconds in spent.items()}
        total = sum(grown.values())
        return Sample(
            at=round(at, 1),
            per_second=round(per_second, 1),
            mean_return=stats.mean_return,
            return_low=low,
            return_high=high,
            mean_length=stats.mean_length,
            staleness=max(0, stats.version - max(0, stats.min_version)),
            time_shares={name: round(seconds / total, 4) for name, seconds in grown.items() if seconds},
        )

    def add(self, sample: Sample) -> None:
        self._fine.append(sample)
        if self._count % self._stride == 0:
            self._coarse.append(sample)
        self._count += 1
        if len(self._coarse) > self._most_coarse:
            self._coarse, self._stride = self._coarse[::2], 2 * self._stride

    def told(self) -> History:
        """The samples of the whole run, oldest first."""
        begin = self._fine[0].at if self._fine else 0.0
        samples = [sample for sample in self._coarse if sample.at < begin] + list(self._fine)
        columns = {name: tuple(getattr(sample, name) for sample in samples) for name in History.model_fields}
        return History.model_validate(columns)


class Moments(Ring[bytes]):
    """History and moments of a head; no moments while there are no listeners. One thread calls `observe`, any thread
    the rest.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(_KEPT, most_listeners=128)
        self.head = head
        document = head.job.model_dump(mode="json", by_alias=True, exclude_unset=True)
        self._manifest = str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        self._lock = threading.Lock()
        """Guards `_past`."""
        self._past = Past()
        self._next_line = 0
        """First line of the log that no moment has sent."""
        self._next_at = 0.0
        self._workers_at = 0.0
        self._position = 0
        """Position in the event ring up to which moments have sent events."""

    def start(self, stats: FleetStats, *, since: float) -> None:
        """Add the first sample, before the head gets the fleet. `since`: when it began to step, in seconds since 1970.
        The mean over the run counts from there.
        """
        elapsed_s = time.time() - since
        rate = stats.stepped_frames / elapsed_s if stats.stepped_frames and elapsed_s > 0 else 0.0
        with self._lock:
            self._past.add(self._past.sample(stats, at=since, per_second=rate))

    # -- the housekeeping thread -------------------------------------------------------------------------------

    def observe(self, stats: FleetStats) -> None:
        """Add a sample and send a moment, at most once a second."""
        now = time.monotonic()
        if now < self._next_at - _SLACK_S and not self.head.end_state:
            return
        self._next_at = now + _EVERY_S
        sample = self._past.sample(stats, at=time.time(), per_second=self.head.rates.rate())
        with self._lock:
            self._past.add(sample)
        if not self.listeners:
            self._position = self.head.events.end
            return
        logs = self._lines_from(self._next_line)
        self._next_line = logs[-1].number + 1 if logs else self._next_line
        tells_workers = now >= self._workers_at or bool(self.head.end_state)
        if tells_workers:
            stats = self.head.running.fleet.stats()
            self._workers_at = now + len(stats.workers) / _WORKERS_A_SECOND - _SLACK_S
        events, self._position = self._events_from(self._position)
        frame = as_frame("moment", self._moment(stats, events, logs, sample, tells_workers=tells_workers))
        self.append(lambda _: frame)

    # -- listeners ---------------------------------------------------------------------------------------------

    def opening(self, stats: FleetStats) -> tuple[list[bytes], int]:
        """The opening frame and the position for `read`."""
        number = self.end
        return [as_frame("opening", self.now(stats))], number

    def now(self, stats: FleetStats) -> Opening:
        """The history of the run and its state."""
        layout = self.head.running.fleet.layout
        events, _ = self._events_from(0)
        with self._lock:
            past = self._past.told()
        return Opening(
            num_envs=layout.num_envs,
            picture=find_picture(layout.observation) is not None,
            history=past,
            moment=self._moment(stats, events, self._lines_from(0), None, tells_workers=True),
            manifest=self._manifest,
        )

    def _moment(
        self,
        stats: FleetStats,
        events: list[Event],
        logs: tuple[LogLine, ...],
        sample: Sample | None,
        *,
        tells_workers: bool,
    ) -> Moment:
        head = self.head
        running = head.running
        workers = (describe_worker(head, worker, published=stats.version) for worker in stats.workers)
        return Moment(
            time=datetime.now(UTC),
            status=describe(head, stats),
            spec_paused=running.pauses.spec_paused,
            workers=tuple(workers) if tells_workers else None,
            updates=running.updates.newest(_MOST_UPDATES),
            events=tuple(events),
            sample=sample,
            logs=logs,
        )

    def _events_from(self, position: int) -> tuple[list[Event], int]:
        ring = self.head.events
        while (news := ring.read(position, most=sys.maxsize)) is None:
            position = ring.begin
        events, position = news
        return [event for event in events if event.kind not in _LEFT_OUT][-_MOST_EVENTS:], position

    def _lines_from(self, number: int) -> tuple[LogLine, ...]:
        lines = TAIL.since(number)
        return tuple(LogLine(number=li.number, time=li.time, level=li.level, text=li.text) for li in lines)


def as_frame(kind: str, data: Answer) -> bytes:
    return f"event: {kind}\ndata: {data.model_dump_json()}\n\n".encode()


class Recorder:
    """The history of one fleet. Use as a context manager while it runs."""

    def __init__(self, job: CollectorJob, fleet: WorkerFleet, *, since: float) -> None:
        """Start recording. `since`: when the fleet began to step, in seconds since 1970. Raises HeadFault if the OTEL_*
        variables require a package that is not installed.
        """
        if job.spec.paused:  # a local run starts at once
            job = job.model_copy(update={"spec": job.spec.model_copy(update={"paused": False})})
        self.head = Head(job, HeadSettings(), HeadTokens(None))
        self.head.has_queue = False  # the run itself is the consumer of its fleet's queue
        self.moments = Moments(self.head)
        self.head.watchers.append(self.moments.observe)
        self.moments.start(fleet.stats(workers=False), since=since)
        self.head.attach(fleet, is_paused=False)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self.head.failure = self.head.failure or str(error)
        self.head.close()


def report_of(moments: Moments) -> str:
    """The report of a run that has ended, or of one that still runs."""
    head = moments.head
    return make_report(
        moments.now(head.running.fleet.stats()).model_dump_json(), state=head.end_state, reason=head.failure
    )
