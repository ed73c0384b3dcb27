"""How much memory Ray's object store may have in this pod."""

import os
from pathlib import Path

import structlog

log = structlog.get_logger()

SMALLEST_STORE = 75 << 20
"""With less Ray does not start."""

_SHM = Path("/dev/shm")  # where Ray keeps the object store
_LIMIT_V2 = Path("/sys/fs/cgroup/memory.max")
_LIMIT_V1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SHM_SHARE = 0.8
"""Share of the free space in /dev/shm: environments and weights use it, too."""
_MEMORY_SHARE = 0.4
"""Share of the memory limit: /dev/shm counts as the container's memory, and processes need the rest."""


def store_bytes() -> int:
    """Bytes for the object store, from the free space of /dev/shm and the pod's memory limit."""
    free = _free_bytes(_SHM)
    found = decide_store_bytes(free_shm=free, memory_limit=_memory_limit())
    if free < found:
        log.warning(
            "shared_memory_is_small",
            reason=f"/dev/shm has {free >> 20} MiB free, and Ray needs {found >> 20} for batches: it will use /tmp, "
            "which is slower; mount an emptyDir with medium Memory at /dev/shm, or raise the pod's memory limit",
        )
    return found


def decide_store_bytes(*, free_shm: int, memory_limit: int) -> int:
    """The smaller share of both, and no less than Ray needs to start."""
    return max(SMALLEST_STORE, min(int(_SHM_SHARE * free_shm), int(_MEMORY_SHARE * memory_limit)))


def _memory_limit() -> int:
    """Bytes within the cgroup's limit, or of the machine where there is none."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (_LIMIT_V2, _LIMIT_V1):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        # cgroup v1 writes "no limit" as a number near 2**63.
        return min(machine, int(text)) if text.isdecimal() else machine
    return machine


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
