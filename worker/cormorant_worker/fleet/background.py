"""Threads for slow work: starting workers, ending them, opening a dataset.

The fleet's own thread holds the fleet's condition and must not wait: it hands such work to these threads, and uses the
result in a later turn.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_NUM_THREADS = 8
"""One that waits for a process which does not die holds up none of the others."""

_POLL_S = 0.02
_ENDING_S = 1.0
"""For a process whose sockets have closed to have ended."""


class BackgroundTasks:
    """Runs functions, in any order. Call `submit` and `settle` with the fleet's condition held."""

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
        # What they did last holds descriptors of workers until they have ended.
        deadline = time.monotonic() + _ENDING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (found := self._jobs.get()) is not None:
            job, then = found
            try:
                result = job()
            except Exception as error:  # noqa: BLE001  # the thread's edge: the caller of `submit` decides
                result = error
            self._done.append((then, result))
            self._wake()
