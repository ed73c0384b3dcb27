"""Events for the fleet's thread: its waker, the connections of all workers, and slow work in other threads."""

import os
import queue
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from cormorant_worker.fleet.slot import WorkerHandle
from cormorant_worker.fleet.transport import Source

T = TypeVar("T")

_READ, _BOTH = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE
_NUM_THREADS = 8
"""One that waits for a process which does not die holds up none of the others."""
_POLL_S = 0.02
_ENDING_S = 1.0
"""For a process whose sockets have closed to have ended."""


class Waker:
    """A descriptor on which one thread waits. `wake` may be called by any thread, and after `close`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        """Guards what follows, and the descriptor: after `close` its number may be another file's. Held for one system
        call that never waits.
        """
        self._is_set = self._is_closed = False

    def fileno(self) -> int:
        """File descriptor to wait on: readable after `wake`."""
        return self._descriptor

    def wake(self) -> None:
        """Wake the thread. Never waits; a second call before it wakes has no effect."""
        with self._lock:
            if not (self._is_set or self._is_closed):
                self._is_set = True
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Clear all calls of `wake` so far. Called by the waiting thread."""
        with self._lock:
            if self._is_set and not self._is_closed:
                self._is_set = False
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)


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


class BackgroundTasks:
    """Threads for slow work: starting workers, ending them, opening a dataset. The fleet's own thread holds the fleet's
    condition and must not wait: it uses results in a later turn. Call `submit` and `settle` with the condition held.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """Begin with nothing to do. `wake`: called by any thread when something is done: `settle` has to look."""
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._done: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._threads: list[threading.Thread] = []
        self._num_under_way = 0

    def submit(self, job: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """Run a function in a thread, without the condition. `then`: called by `settle` with its result or error."""
        self._num_under_way += 1
        self._jobs.put((job, then))
        if len(self._threads) < min(_NUM_THREADS, self._num_under_way):
            thread = threading.Thread(target=self._run, name=f"fleet-background-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def settle(self) -> None:
        while self._done:
            then, result = self._done.popleft()
            self._num_under_way -= 1
            then(result)

    def finish(self, condition: threading.Condition, *, timeout_s: float) -> None:
        """Settle all jobs, at most for `timeout_s`, and end the threads; one that never ends dies with the process."""
        deadline = time.monotonic() + timeout_s
        while self._num_under_way and time.monotonic() < deadline:
            with condition:
                self.settle()
            time.sleep(_POLL_S)
        for _ in self._threads:
            self._jobs.put(None)
        # Their last jobs hold descriptors of workers until the threads have ended.
        deadline = time.monotonic() + _ENDING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (message := self._jobs.get()) is not None:
            job, then = message
            try:
                result = job()
            except Exception as error:  # noqa: BLE001  # the thread's edge: the caller of `submit` decides
                result = error
            self._done.append((then, result))
            self._wake()
