"""The fleet's thread: one turn after the other, each with the fleet's condition held for a moment.

A turn costs what has happened since the last one, whatever the number of workers, and waits for nothing. Between two
turns the thread waits for its waker, and for all connections:

waker ───────────────────────┐
sources of connections ──────┴─> select ──> ready ──> Inbox.receive, as many as there is time for
connections without sources ──> note_news (any thread) ──┘
"""

import selectors
import threading
import time
from collections import deque
from contextlib import suppress
from typing import ClassVar

import structlog

from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.core import FleetCore
from cormorant_worker.fleet.slot import WorkerHandle
from cormorant_worker.fleet.transport import Source, WorkerConnection
from cormorant_worker.fleet.turn.inbox import Inbox
from cormorant_worker.fleet.turn.life import SlotLife
from cormorant_worker.fleet.turn.quiesce import Quiesce
from cormorant_worker.fleet.turn.tickets import Tickets

log = structlog.get_logger()

_POLL_S = 0.2
_TURN_S = 0.001
"""What has come is dealt with for so long at once; then callers may have the condition."""
_MOST_OFFERS = 48
"""In one turn."""
_BREATH_S = 0.0002
_ENDING_S = 10.0
_READ, _BOTH = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE
_CLOCK_EVERY = 16
"""Messages between two looks at the clock."""

Event = tuple[selectors.SelectorKey, int]


class ConnectionSelector:
    """Owned by the fleet's thread, except `note_news`."""

    def __init__(self, core: FleetCore, inbox: Inbox) -> None:
        self._core, self._inbox = core, inbox
        self._selector = selectors.DefaultSelector()
        self._selector.register(core.waker, _READ)
        self._handles: dict[WorkerConnection, WorkerHandle] = {}
        """By connection, by identity: those that are listened to."""
        self._ready: deque[Event] = deque()
        """Ready at the last look, and not dealt with yet."""
        self._news: deque[WorkerConnection] = deque()

    def note_news(self, connection: WorkerConnection) -> None:
        """A connection without sources has news. Called by any thread."""
        self._news.append(connection)
        self._core.waker.wake()

    def wait(self, timeout_s: float) -> list[Event]:
        """Wait until a source is ready. Without the condition."""
        if self._ready:
            return []  # those that are left are dealt with first
        return self._selector.select(0.0 if self._news else timeout_s)

    def deal_with(self, ready: list[Event], *, until: float) -> bool:
        """Receive what is ready, with the condition held. Returns whether some is left for the next turn."""
        self._ready.extend(found for found in ready if found[0].data is not None)
        heard = 0
        while self._ready or self._news:
            if self._ready:
                key, events = self._ready.popleft()
                handle: WorkerHandle = key.data
                source: Source = key.fileobj  # type: ignore[assignment]  # what was registered
                if events & _READ:
                    self._inbox.receive(handle, source)
            else:
                if (known := self._handles.get(self._news.popleft())) is not None:
                    self._inbox.receive(known, None)
            heard += 1
            if not heard % _CLOCK_EVERY and time.monotonic() > until:
                break
        return bool(self._ready or self._news)

    def follow_slots(self) -> None:
        """Listen to workers that joined, and not to those that parted; wait to write to those that do not read."""
        slots = self._core.slots
        while slots.joined:
            handle = slots.joined.popleft()
            if handle.is_gone:
                continue
            self._handles[handle.connection] = handle
            for source in handle.connection.sources():
                self._selector.register(source, _READ, handle)
            # What came before the connection was listened to.
            if not handle.connection.sources():
                self.note_news(handle.connection)
            slots.stuck.add(handle)  # what it was sent may have waited since
        while slots.parted:
            handle, see_off = slots.parted.popleft()
            if self._handles.pop(handle.connection, None) is not None:
                for source in handle.connection.sources():
                    self._selector.unregister(source)
            see_off()  # from here on its descriptors may be closed
        for handle in tuple(slots.stuck):
            unsent = handle.connection.flush() if not handle.is_gone else ()
            if not unsent:
                slots.stuck.discard(handle)
            if not handle.is_gone:
                for source in handle.connection.sources():
                    self._selector.modify(source, _BOTH if source in unsent else _READ, handle)

    def close(self) -> None:
        """Stop listening. The waker and the sources are others' to close."""
        self._selector.close()


class FleetLoop:
    validates: ClassVar[bool] = False
    """Check after each turn what always holds. For tests: it looks at every slot."""

    def __init__(
        self,
        core: FleetCore,
        changed: threading.Condition,
        selector: ConnectionSelector,
        life: SlotLife,
        tickets: Tickets,
        quiesce: Quiesce,
    ) -> None:
        self.is_done = False
        """All frames that will be are accepted, and durable with a dataset."""
        self._core, self._changed, self._selector = core, changed, selector
        self._life, self._tickets, self._quiesce = life, tickets, quiesce
        self._is_stopped = False
        self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    @property
    def silent_s(self) -> float:
        """Seconds since the last turn. Never waits."""
        return 0.0 if self._is_stopped else time.monotonic() - self._turned_at

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Make no more turns. With the condition held."""
        self._is_stopped = True
        self._core.waker.wake()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout=_ENDING_S)

    def _run(self) -> None:
        core = self._core
        try:
            has_more = True
            while True:
                ready = self._selector.wait(0.0 if has_more else _POLL_S)
                with self._changed:
                    if self._is_stopped:
                        return
                    has_more = self._turn(ready)
                core.events.tell()  # without the condition: a listener must not hold callers up
                if has_more:
                    time.sleep(_BREATH_S)  # callers that wait for the condition get it
        except Exception as error:
            with self._changed:
                core.lifecycle.fail(FleetError(f"the fleet's thread failed: {type(error).__name__}: {error}"))
                self._changed.notify_all()
            with suppress(OSError, ValueError):  # what failed may be a log line, into a closed pipe or file
                log.exception("fleet_thread_failed")
        finally:
            core.events.tell()

    def _turn(self, ready: list[Event]) -> bool:
        """Deal with what has come, and with everything that may be due. Returns whether there is more."""
        core = self._core
        now = self._turned_at = time.monotonic()
        core.waker.clear()
        has_more = self._selector.deal_with(ready, until=now + _TURN_S)
        core.background.settle()
        self._life.start_missing(now)
        self._life.end_hung(now)
        core.queue.accept()
        core.counters.tick(is_full=core.queue.is_full)
        core.offers.send_due(_MOST_OFFERS)
        has_more |= core.offers.has_due
        if core.lifecycle.can_collect and not self._quiesce.is_wanted:
            has_more |= self._tickets.hand_out()
        has_more |= self._life.finish_idle()
        if core.scheduler.is_done and core.queue.is_drained:
            self.is_done = core.dataset is None or core.slots.is_empty
        self._selector.follow_slots()
        if self.validates:
            self._tickets.validate()
        self._changed.notify_all()
        return has_more
