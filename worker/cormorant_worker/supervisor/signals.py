"""SIGTERM and SIGINT: recorded on arrival, handled in the supervisor's next turn."""

import signal
from types import FrameType

SIGNAL_BASE = 128
"""A process that signal n ended has the exit code 128 + n."""


class PodSignals:
    """What has come in, in order."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def install(self) -> None:
        """Note both from now on. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    @property
    def exit_code(self) -> int:
        """Exit code of a process that the first signal ended."""
        return SIGNAL_BASE + self.received[0]

    def __bool__(self) -> bool:
        """True when a signal has arrived: this process should end."""
        return bool(self.received)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
