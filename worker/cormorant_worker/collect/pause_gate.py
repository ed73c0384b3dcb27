"""Requests of a control thread to the collector's thread: run, pause, stop. Checked once per vector step.

RUNNING <-> PAUSED      -> STOPPED       and, independently: sealed, until the current batch has ended
"""

import threading

from cormorant_worker.errors import CormorantError


class Stopped(CormorantError):
    """The collector was stopped in the middle of a batch and gave that batch up."""


class PauseGate:
    """Written by a control thread, checked by the collector. Attributes are deliberately read without a lock."""

    def __init__(self) -> None:
        self.is_closed = False
        """True when the collector must look before it goes on: it is paused, stopped or sealed."""
        self.is_sealed = False
        """True when the current batch must end with the frames it has."""
        self._changing = threading.Lock()
        """Guards what `is_closed` is derived from; the collector's thread writes to it, too."""
        self._stopped = False
        self._running = threading.Event()
        self._running.set()
        self._waiting = threading.Event()

    def pause(self) -> None:
        """Ask the collector to stop stepping at its next vector step."""
        with self._changing:
            self._running.clear()
            self._update()

    def resume(self) -> None:
        with self._changing:
            self._running.set()
            self._update()

    def seal(self) -> None:
        """Ask the collector to end its batch at its next vector step, with the frames it has."""
        with self._changing:
            self.is_sealed = True
            self._update()

    def unseal(self) -> None:
        """Called when the sealed batch has ended; the next batch is complete again."""
        with self._changing:
            self.is_sealed = False
            self._update()

    def stop(self) -> None:
        with self._changing:
            self._stopped = True
            self._running.set()
            self._update()

    def _update(self) -> None:
        self.is_closed = self._stopped or self.is_sealed or not self._running.is_set()

    def wait_until_paused(self, timeout_s: float) -> bool:
        """Wait until the collector waits in `wait_while_paused`. False after `timeout_s`."""
        return self._waiting.wait(timeout_s)

    def wait_while_paused(self) -> None:
        """Called by the collector when it sees `is_closed`."""
        while not self._running.is_set():  # again if `pause` was called before this thread woke up
            self._waiting.set()
            # The thread that paused bounds this wait; when that process dies, it takes this one with it.
            self._running.wait()
            self._waiting.clear()
        if self._stopped:
            raise Stopped("the collector was stopped in the middle of a batch")
