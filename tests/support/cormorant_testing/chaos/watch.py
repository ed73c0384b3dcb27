"""Control calls with a limit: what does not return in time is a finding, and says where every thread stands."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cormorant_testing.chaos.judge import Finding

T = TypeVar("T")
LIMIT_S = 40.0
"""For one control call: far more than its own limits, on a busy machine."""


def within(limit_s: float, what: str, call: Callable[[], T]) -> T:
    """Call something in a thread of its own.

    Raises:
        Finding: it did not return in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  # the thread's edge: raised below
            errors.append(error)

    thread = threading.Thread(target=run, name=f"call: {what}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise Finding(f"{what} did not return within {limit_s:.0f} s\n{stacks()}")
    if errors:
        raise errors[0]
    return results[0]


def stacks() -> str:
    """Where every thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        lines = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)[-8:]]
        found.append(f"-- {names.get(ident, ident)}: {' > '.join(lines)}")
    return "\n".join(found)


class Watch(threading.Thread):
    """Calls something again and again until it is closed; keeps what went wrong first."""

    def __init__(self, what: str, call: Callable[[], object], *, limit_s: float, every_s: float = 0.5) -> None:
        super().__init__(name=f"watch: {what}", daemon=True)
        self._what, self._call, self._limit_s, self._every_s = what, call, limit_s, every_s
        self._over = threading.Event()
        self.error: BaseException | None = None
        self.slowest_s = 0.0

    def run(self) -> None:
        while not self._over.wait(self._every_s) and self.error is None:
            began = time.monotonic()
            try:
                within(self._limit_s, self._what, self._call)
            except BaseException as error:  # noqa: BLE001  # the thread's edge: raised by `check`
                self.error = error
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def check(self) -> None:
        """Raise what went wrong."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._over.set()
        self.join(self._limit_s + 1)
