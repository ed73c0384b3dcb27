"""Layout of a worker's heartbeat: int64 numbers in native byte order.

    frames landed | phase | process id | nanoseconds by activity .. | the activity that goes on | since when

Does not import numpy, because the supervisor of a pod also reads heartbeats.
"""

import struct
from collections.abc import Sequence

FRAMES, PHASE, PID, TIMING = range(4)
"""Positions; the numbers of a `Timing` begin at TIMING."""
NUM_ACTIVITIES = 8
ACTIVITY, SINCE = NUM_ACTIVITIES, NUM_ACTIVITIES + 1
"""Positions within the timing; SINCE is 0 before anything has begun."""
NUM_TIMING = NUM_ACTIVITIES + 2
STEPPING = -1
"""Value of ACTIVITY while stepping: this time is divided among several activities when the next vector step is
measured."""
_ALL = struct.Struct(f"={TIMING + NUM_TIMING}q")
SIZE_BYTES = _ALL.size


def parse(data: bytes) -> tuple[int, ...]:
    """Read the numbers of a heartbeat file. Raises struct.error where it is incomplete."""
    return _ALL.unpack(data)


def spent_ns(timing: Sequence[int], *, until_ns: int) -> tuple[int, ...]:
    """Nanoseconds by activity, from the [NUM_TIMING] numbers: of vector steps, up to the last measured one; of another
    current activity, which is written only when it ends, up to `until_ns` by this machine's `time.monotonic_ns`.
    """
    activity, since = timing[ACTIVITY], timing[SINCE]
    spent = list(timing[:NUM_ACTIVITIES])
    if activity != STEPPING and since:
        spent[activity] += max(0, until_ns - since)
    return tuple(spent)
