"""How many workers a group should have, by who waits for whom: `autoscale` of a worker group.

    learners wait, workers are busy    more workers: as many as would have kept the learners busy
    workers are idle, no learner waits fewer: as many as would have been busy nine tenths of the time
    both, or neither                   the size is right, or not what limits (on-policy learners wait and let wait)

Evidence is a period in which the size did not change and every worker was ready; see `JobState`. Between the thresholds
nothing changes, and a step down never reaches a size at which learners would wait again, so it settles.
"""

from collections.abc import Sequence
from math import ceil

from cormorant_contract.workers import Autoscale
from cormorant_operator.job_state import DOWN_AFTER_S, UP_AFTER_S, WaitShares

_WAITS = 0.2
_IDLE = 0.25
_RARELY = 0.05
_BUSY = 0.9
_AT_MOST = 0.5
"""Share of waiting that counts: a group at most doubles at a time."""


def autoscaled(scale: Autoscale, size: int, wait_shares: Sequence[WaitShares], *, group: str) -> int:
    """The size of a group that has `size` workers now. `wait_shares`: of several periods that end now; those of another
    size say nothing.
    """
    wanted = size
    for shares in wait_shares:
        if shares.sizes.get(group) != size:
            continue
        idle = shares.idle.get(group, 0.0)
        if shares.seconds >= UP_AFTER_S and shares.consumer > _WAITS and idle < _RARELY:
            wanted = ceil(size / (1 - min(shares.consumer, _AT_MOST)))
            break
        if shares.seconds >= DOWN_AFTER_S and idle > _IDLE and shares.consumer < _RARELY:
            wanted = min(size, ceil(size * (1 - idle) / _BUSY))
            break
    return min(max(wanted, scale.min_replicas), scale.max_replicas)
