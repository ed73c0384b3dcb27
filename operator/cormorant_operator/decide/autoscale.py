"""The size of a worker group with `autoscale`, by whether workers or learners wait.

    learners wait, workers are busy    more workers: as many as would have kept the learners busy
    workers are idle, no learner waits fewer: as many as would have been busy nine tenths of the time
    both, or neither                   the size is right, or not what limits (on-policy learners wait and let wait)

Evidence is a period in which the size did not change and every worker was ready (`JobState.waits`). Between the
thresholds nothing changes, and a step down never reaches a size at which learners would wait again, so it settles.
"""

from collections.abc import Sequence
from datetime import datetime
from math import ceil

from cormorant_contract.workers import Autoscale
from cormorant_operator.job_state import WAITS_LAST_S, Waits

_UP_AFTER_S = 30.0
_WAITS = 0.2
_IDLE = 0.25
_RARELY = 0.05
_BUSY = 0.9
_AT_MOST = 0.5
"""Cap on the waiting share: a group at most doubles in one step."""


def autoscaled(scale: Autoscale, size: int, waits: Sequence[tuple[datetime, Waits]], *, group: str) -> int:
    """The next size of a group with `size` workers. `waits`: observations at other sizes are ignored."""
    wanted, is_measured = size, bool(waits) and waits[-1][1].sizes.get(group) == size
    for period_s in (_UP_AFTER_S, WAITS_LAST_S) if is_measured else ():
        consumer, idle = _shares(waits, period_s, group)
        if consumer > _WAITS and idle < _RARELY:
            wanted = ceil(size / (1 - min(consumer, _AT_MOST)))
            break
        if period_s == WAITS_LAST_S and idle > _IDLE and consumer < _RARELY:
            wanted = min(size, ceil(size * (1 - idle) / _BUSY))
    return min(max(wanted, scale.min_replicas), scale.max_replicas)


def _shares(waits: Sequence[tuple[datetime, Waits]], period_s: float, group: str) -> tuple[float, float]:
    """Over the last `period_s`, the share of time in which a learner waited, and the share of the workers' time without
    a batch to collect. Both are 0 if the observation is shorter.
    """
    until, last = waits[-1]
    for since, first in reversed(waits):
        if (seconds := (until - since).total_seconds()) >= period_s:
            worker_s = last.worker_s.get(group, 0.0) - first.worker_s.get(group, 0.0)
            idle_s = last.idle_s.get(group, 0.0) - first.idle_s.get(group, 0.0)
            idle = min(1.0, max(0.0, idle_s / worker_s)) if worker_s > 0 else 0.0
            return min(1.0, max(0.0, (last.consumer_s - first.consumer_s) / seconds)), idle
    return 0.0, 0.0
