"""Wakes a thread that waits for descriptors."""

import os
import threading


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
