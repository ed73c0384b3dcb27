"""Run, pause, stop: what a control thread tells the collector's thread, which looks once a vector step.

OPEN <-> SHUT      -> STOPPED       and, beside it: sealed, until the batch under way has ended
"""

import threading

from cormorant_worker.errors import CormorantError


class Stopped(CormorantError):
    """The collector was told to stop in the middle of a batch; what it had of it is given up."""


class Gate:
    """Written by a control thread, passed by the collector. Attributes are read without a lock on purpose."""

    def __init__(self) -> None:
        self.is_closed = False
        """True when the collector must not simply go on: shut, stopped or sealed."""
        self.is_sealed = False
        """True when the batch under way must end with what it has."""
        self._changing = threading.Lock()
        """Guards changes of what `is_closed` is made of; the collector's thread makes some, too."""
        self._stopped = False
        self._open = threading.Event()
        self._open.set()
        self._held = threading.Event()

    def shut(self) -> None:
        """Ask the collector to stop stepping at its next vector step."""
        with self._changing:
            self._open.clear()
            self._close_or_open()

    def open(self) -> None:
        """Let the collector go on where it stopped."""
        with self._changing:
            self._open.set()
            self._close_or_open()

    def seal(self) -> None:
        """Ask the collector to end its batch at its next vector step, with what it has."""
        with self._changing:
            self.is_sealed = True
            self._close_or_open()

    def unseal(self) -> None:
        """The next batch is not concerned."""
        with self._changing:
            self.is_sealed = False
            self._close_or_open()

    def _close_or_open(self) -> None:
        self.is_closed = self._stopped or self.is_sealed or not self._open.is_set()

    def stop(self) -> None:
        """Make the collector give up its batch."""
        with self._changing:
            self._stopped = True
            self._open.set()
            self._close_or_open()

    def is_held(self) -> bool:
        """True when the collector stands at the shut gate."""
        return self._held.is_set()

    def wait_until_held(self, timeout_s: float) -> bool:
        """Wait until the collector stands at the gate. False after `timeout_s`."""
        return self._held.wait(timeout_s)

    def hold(self) -> None:
        """Called by the collector when it sees `is_closed`: returns when the gate is open again.

        Raises:
            Stopped: the collector must give up its batch.
        """
        while not self._open.is_set():  # again when it was shut anew before this thread woke up
            self._held.set()
            # Bounded by whoever shut the gate: a parent that dies takes this process with it.
            self._open.wait()
            self._held.clear()
        if self._stopped:
            raise Stopped("the collector was stopped in the middle of a batch")
