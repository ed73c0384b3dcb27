"""What wakes the fleet's thread out of its wait: rung by callers that have changed something."""

import os
import threading


class Waker:
    """A pipe of which only the fleet's thread reads. `ring` may be called by any thread, and after `close`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock = threading.Lock()
        """Guards what follows, and the descriptors: after `close` their numbers are somebody else's. Held for one
        system call that never waits.
        """
        self._is_rung = self._is_closed = False

    def fileno(self) -> int:
        """What to wait on: readable once somebody has rung."""
        return self._read

    def ring(self) -> None:
        """Have the thread look at once. Never waits; ringing twice is as good as once."""
        with self._lock:
            if not (self._is_rung or self._is_closed):
                self._is_rung = True
                os.write(self._write, b"x")

    def hush(self) -> None:
        """Forget who has rung so far. Called by the fleet's thread."""
        with self._lock:
            if self._is_rung and not self._is_closed:
                self._is_rung = False
                os.read(self._read, 1)

    def close(self) -> None:
        """Close both ends. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._read)
                os.close(self._write)
