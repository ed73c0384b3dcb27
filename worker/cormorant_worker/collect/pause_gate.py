"""Requests of a control thread to the collector's thread: run, pause, stop. Checked once per vector step.

RUNNING <-> PAUSED      -> STOPPED       and, independently: batches up to the one of some ticket are sealed
"""

import threading

from cormorant_worker.errors import CormorantError


class Stopped(CormorantError):
    """The collector was stopped in the middle of a batch and gave that batch up."""


class PauseGate:
    """Written by a control thread, checked by the collector. Attributes are deliberately read without a lock."""

    def __init__(self) -> None:
        self.ticket = 0
        """Number of the current batch's ticket, written by the collector's thread."""
        self.sealed_through = -1
        """Batches of this ticket and of earlier ones end at their next vector step, with the frames they have."""
        self._stopped = False
        self._running = threading.Event()
        self._running.set()
        self._waiting = threading.Event()

    @property
    def is_closed(self) -> bool:
        """True when the collector must look before it goes on: it is paused, stopped or sealed."""
        return self._stopped or self.ticket <= self.sealed_through or not self._running.is_set()

    @property
    def is_sealed(self) -> bool:
        """True when the current batch must end with the frames it has."""
        return self.ticket <= self.sealed_through

    def pause(self) -> None:
        """Ask the collector to stop stepping at its next vector step."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def stop(self) -> None:
        self._stopped = True
        self._running.set()

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
