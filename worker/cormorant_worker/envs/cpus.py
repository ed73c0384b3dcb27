"""How many processors this process may use: affinity and cgroup quota, which EnvPool's own default ignores."""

import os
from pathlib import Path

_QUOTA_V2 = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_PERIOD_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def available_cpus() -> int:
    """Whole processors within this process's CPU limit, at least 1."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        allowed = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(allowed, int(quota))) if quota else allowed


def _cgroup_quota() -> float:
    """CPUs that the cgroup grants per period; 0 when there is no limit."""
    try:
        if _QUOTA_V2.exists():
            quota, period = _QUOTA_V2.read_text().split()
            return 0.0 if quota == "max" else int(quota) / int(period)
        if _QUOTA_V1.exists():
            quota_us = int(_QUOTA_V1.read_text())
            return quota_us / int(_PERIOD_V1.read_text()) if quota_us > 0 else 0.0
    except (OSError, ValueError):
        return 0.0  # an unreadable limit is no limit
    return 0.0
