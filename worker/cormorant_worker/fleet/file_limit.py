"""Limit of open files, of which every worker needs some."""

import resource
import sys
from pathlib import Path

import structlog

from cormorant_worker.errors import FleetError

log = structlog.get_logger()

_OTHERS = 256
"""File descriptors of the rest of the program: libraries, log files, connections of a head's clients."""
_SPARE = 64
"""What a program with more open files may still open."""


def raise_file_limit(num_workers: int, *, each: int) -> None:
    """Raise, never lower, this process's soft limit for so many workers with `each` descriptors, if the system allows
    it.
    """
    needed = num_workers * each + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if most < needed:
        raise FleetError(
            f"{num_workers} workers need {needed:,} open files ({each} each, and {_OTHERS}), this process may "
            f"have {hard:,} (ulimit -Hn); raise that limit, or start {max(0, (hard - _OTHERS) // each):,} workers"
        )
    # A program that has more open than that keeps its own share. Some of them may be this fleet's: then it is too much.
    num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    wanted = min(most, max(needed, num_workers * each + num_open + _SPARE))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.debug("file_limit_raised", soft_limit=wanted, before=soft, workers=num_workers)
