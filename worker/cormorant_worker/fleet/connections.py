"""Event sources of the fleet's thread: its waker, and the connections of all workers."""

import selectors
from collections import deque

from cormorant_worker.fleet.slot import WorkerHandle
from cormorant_worker.fleet.transport import Source
from cormorant_worker.fleet.waker import Waker

_READ, _BOTH = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE


class Connections:
    """Call with the fleet's condition held, except `wait`, which only the fleet's thread calls."""

    def __init__(self, waker: Waker) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(waker, _READ)
        self.ready: deque[tuple[WorkerHandle, Source]] = deque()
        """Workers with a message at the last look, and its source; the caller takes them."""
        self.stuck: set[WorkerHandle] = set()
        """Workers that do not read as fast as they are sent."""

    def add(self, handle: WorkerHandle) -> None:
        """Listen to a worker, including messages that have already arrived."""
        for source in handle.connection.sources():
            self._selector.register(source, _READ, handle)
        self.stuck.add(handle)  # what it was sent may have waited since

    def remove(self, handle: WorkerHandle) -> None:
        """Stop listening to a worker, after which its descriptors may be closed."""
        self.stuck.discard(handle)
        for source in handle.connection.sources():
            self._selector.unregister(source)

    def wait(self, timeout_s: float) -> None:
        """Wait until something is ready. Without the condition: other threads add and remove meanwhile."""
        if not self.ready:  # those that are left are dealt with first
            for key, events in self._selector.select(timeout_s):
                if key.data is not None and events & _READ:
                    self.ready.append((key.data, key.fileobj))  # type: ignore[arg-type]  # what was registered

    def flush(self) -> None:
        """Send buffered messages; wait until the remaining sockets are writable."""
        for handle in tuple(self.stuck):
            unsent = handle.connection.flush()
            if not unsent:
                self.stuck.discard(handle)
            for source in handle.connection.sources():
                self._selector.modify(source, _BOTH if source in unsent else _READ, handle)

    def close(self) -> None:
        """Stop listening. The owners of the waker and the sources close them."""
        self._selector.close()
