"""State for live pages: one snapshot (moment) per second, serialized once for all listeners.

housekeeping thread --observe--> history
                                 moment -> bytes --notifier--> every `LiveStream`
"""

import threading
import time
from collections import deque
from datetime import UTC, datetime

import yaml

from cormorant_api.control.event_ring import Ring
from cormorant_api.head import Head
from cormorant_api.live.history import Past
from cormorant_api.live.previews import find_picture, size_of
from cormorant_api.status import describe, describe_worker
from cormorant_contract.rest.base import Answer
from cormorant_contract.rest.events import Event
from cormorant_contract.rest.live import LogLine, Moment, Opening, PictureSize, Sample
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
        size = None
        if (picture := find_picture(layout.observation)) is not None:
            height, width = size_of(layout.observation[picture].shape)
            size = PictureSize(height=height, width=width)
        events, _ = self._events_from(0)
        with self._lock:
            past = self._past.told()
        return Opening(
            num_envs=layout.num_envs,
            picture=size,
            history=past,
            moment=self._moment(stats, events, self._lines_from(0), None, tells_workers=True),
            manifest=self._manifest,
        )

    # -- content -----------------------------------------------------------------------------------------------

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
        found: deque[Event] = deque(maxlen=_MOST_EVENTS)
        while True:
            news = ring.read(position)
            if news is None:
                position = ring.begin
                continue
            events, position = news
            if not events:
                return list(found), position
            found.extend(event for event in events if event.kind not in _LEFT_OUT)

    def _lines_from(self, number: int) -> tuple[LogLine, ...]:
        lines = TAIL.since(number)
        return tuple(LogLine(number=li.number, time=li.time, level=li.level, text=li.text) for li in lines)


def as_frame(kind: str, data: Answer) -> bytes:
    return f"event: {kind}\ndata: {data.model_dump_json()}\n\n".encode()
