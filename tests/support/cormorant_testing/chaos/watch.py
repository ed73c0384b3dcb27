"""Control calls with a limit: what does not return in time is a finding, and says where every thread stands."""

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cormorant_testing.chaos.judge import Finding
from cormorant_testing.scripts import Repeated

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
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        lines = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)[-8:]]
        found.append(f"-- {names.get(ident, ident)}: {' > '.join(lines)}")
    return "\n".join(found)


class Watch(Repeated):
    """Calls something again and again until it is closed; keeps what went wrong first."""

    def __init__(self, what: str, call: Callable[[], object]) -> None:
        super().__init__(self._look, every_s=0.5)
        self._what, self._watched = what, call
        self._error: BaseException | None = None

    def _look(self) -> None:
        try:
            if self._error is None:
                within(LIMIT_S, self._what, self._watched)
        except BaseException as error:  # noqa: BLE001  # the thread's edge: raised by `check`
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error
