"""What a worker's heartbeat holds, number by number: int64, as this machine writes them.

    frames landed | phase | process id | nanoseconds by activity .. | the activity that goes on | since when

Without numpy: the supervisor of a pod reads it, too.
"""

import struct
from collections.abc import Sequence

FRAMES, PHASE, PID, TIMING = range(4)
"""Where each is; at TIMING begin the numbers of a `Timing`."""
NUM_ACTIVITIES = 8
ACTIVITY, SINCE = NUM_ACTIVITIES, NUM_ACTIVITIES + 1
"""Within the timing; 0 as SINCE: nothing has begun."""
NUM_TIMING = NUM_ACTIVITIES + 2
STEPPING = -1
"""As ACTIVITY: shared out between several, when the next vector step is measured."""
_ALL = struct.Struct(f"={TIMING + NUM_TIMING}q")
SIZE_BYTES = _ALL.size


def parse(data: bytes) -> tuple[int, ...]:
    """The numbers of a heartbeat in a file.

    Raises:
        struct.error: it is not a whole one.
    """
    return _ALL.unpack(data)


def spent_ns(timing: Sequence[int], *, until_ns: int) -> tuple[int, ...]:
    """Nanoseconds by activity; of vector steps, up to the last measured one.

    Args:
        timing: [NUM_TIMING] numbers.
        until_ns: up to when, by `time.monotonic_ns` of this machine. What goes on is not written until it ends.
    """
    activity, since = timing[ACTIVITY], timing[SINCE]
    spent = list(timing[:NUM_ACTIVITIES])
    if activity != STEPPING and since:
        spent[activity] += max(0, until_ns - since)
    return tuple(spent)
