"""Work that is counted and not timed: the same on every machine."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[..., object], *args: Any, **kwargs: Any) -> int:
    """Lines of Python that a call executes in this thread."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # what it finds dead has lines of its own
    sys.settrace(trace)
    try:
        call(*args, **kwargs)
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
