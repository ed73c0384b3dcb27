"""What the fleet's thread waits for: its waker, and all connections. Registered once, not at every turn.

waker ───────────────────────┐
sources of connections ──────┴─> select ──> ready ──> Inbox.receive, as many as there is time for
connections without sources ──> note_news (any thread) ──┘
"""

import selectors
import time
from collections import deque

from cormorant_worker.fleet.bookkeeping.core import FleetCore
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle
from cormorant_worker.fleet.transport import Source, WorkerConnection
from cormorant_worker.fleet.turn.inbox import Inbox

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
        self._writers: dict[Source, WorkerConnection] = {}
        """Sources that wait to be written."""

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
                if events & selectors.EVENT_WRITE and not handle.is_gone:
                    handle.connection.flush(source)
                if events & _READ:
                    self._inbox.receive(handle, source)
            else:
                found = self._handles.get(self._news.popleft())
                if found is not None:
                    self._inbox.receive(found, None)
            heard += 1
            if not heard % _CLOCK_EVERY and time.monotonic() > until:
                break
        return bool(self._ready or self._news)

    def follow_pool(self) -> None:
        """Listen to workers that joined, and not to those that parted; wait to write to those that do not read."""
        pool = self._core.pool
        while pool.joined:
            handle = pool.joined.popleft()
            if handle.is_gone:
                continue
            self._handles[handle.connection] = handle
            for source in handle.connection.sources():
                self._selector.register(source, _READ, handle)
            # What came before the connection was listened to.
            if not handle.connection.sources():
                self.note_news(handle.connection)
            self._await_writing(handle)
        while pool.parted:
            handle, see_off = pool.parted.popleft()
            if self._handles.pop(handle.connection, None) is not None:
                for source in handle.connection.sources():
                    self._writers.pop(source, None)
                    self._selector.unregister(source)
            see_off()  # from here on its descriptors may be closed
        for source, connection in list(self._writers.items()):
            if source not in connection.unsent():
                del self._writers[source]
                self._selector.modify(source, _READ, self._handles[connection])
        stuck = self._core.requests.stuck
        while stuck:
            self._await_writing(stuck.popleft())

    def _await_writing(self, handle: WorkerHandle) -> None:
        if handle.connection in self._handles:
            for source in handle.connection.unsent():
                self._writers[source] = handle.connection
                self._selector.modify(source, _BOTH, handle)

    def close(self) -> None:
        """Stop listening. The waker and the sources are others' to close."""
        self._selector.close()
