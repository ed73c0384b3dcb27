"""Files that this process may have open: every worker needs some."""

import resource

import structlog

from cormorant_worker.errors import FleetError

log = structlog.get_logger()

_OTHERS = 256
"""File descriptors of the rest of the program: libraries, log files, connections of a head's clients."""


def raise_file_limit(num_workers: int, *, each: int) -> None:
    """Raise this process's own limit (the soft one) as far as so many workers need, where the system allows it. It is
    never lowered.

    Args:
        num_workers: of one fleet.
        each: descriptors that a worker takes here.

    Raises:
        FleetError: the system allows fewer (the hard limit).
    """
    needed = num_workers * each + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise FleetError(
            f"{num_workers} workers need {needed:,} open files ({each} each, and {_OTHERS}), this process may "
            f"have {hard:,} (ulimit -Hn); raise that limit, or start {max(0, (hard - _OTHERS) // each):,} workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    log.debug("file_limit_raised", soft_limit=needed, before=soft, workers=num_workers)
