"""Batches in the head's own memory, for a learner on the same machine: opened by path, mapped, never sent.

A mapping holds a shared lock on its memory (flock), and the head does not reuse the memory while a lock is held. The
lock belongs to the open file: it ends with the batch, with its last array, or with the process, however that ends.

A path like /proc/17/fd/9 means something else on another machine, and in another container: memory is opened only when
the process in the path is the one that listens at the head's port here.
"""

import fcntl
import mmap
import os
import re
import time
import weakref
from contextlib import suppress

from cormorant_client.head import HeadConnection

_PATH = re.compile(r"^/proc/([0-9]+)/fd/[0-9]+$")
_LOCK_WITHIN_S = 1.0


class NotHere(Exception):
    """This process cannot open the head's memory."""


class Held:
    """The memories of one batch: locked until `release`, or until this object and its arrays are garbage-collected."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        weakref.finalize(self, _close, self.descriptors)

    def release(self) -> None:
        """Let the head reuse the memory. May be called twice."""
        _close(self.descriptors, unlocks=True)


class Mappings:
    """Maps the head's memory. Each batch gets its own mappings, which end with its last array."""

    def __init__(self, head: HeadConnection) -> None:
        self._ports = {used.port for used in (head.address, head.bulk) if used is not None and used.is_loopback}
        self._heads: set[int] = set()
        """Pids verified to be the head."""

    def open(self, path: str, size_bytes: int, held: Held) -> memoryview:
        """Map one memory and lock it, so that the head does not write there.

        Args:
            held: gets the open file, which `held.release` closes.

        Raises:
            NotHere: the path does not exist, belongs to another process, or may not be opened.
        """
        match = _PATH.match(path)
        if match is None:
            raise NotHere(f"{path} is not the path of a process's descriptor")
        pid = int(match[1])
        if pid not in self._heads:
            if not _listens(pid, self._ports):
                raise NotHere(f"process {pid} of this machine is not the head")
            self._heads.add(pid)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NotHere(f"{path} cannot be opened: {error.strerror}") from error
        held.descriptors.append(descriptor)
        try:
            held_bytes = os.fstat(descriptor).st_size
            if held_bytes >= size_bytes:
                _lock(descriptor)
                return memoryview(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:
            raise NotHere(f"{path} cannot be mapped: {error}") from error
        raise NotHere(f"{path} holds {held_bytes:,} bytes, fewer than the {size_bytes:,} of the batch")


def _lock(descriptor: int) -> None:
    # The head locks it for a moment to test for holders; wait for that.
    deadline = time.monotonic() + _LOCK_WITHIN_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
        else:
            return


def _close(descriptors: list[int], *, unlocks: bool = False) -> None:
    while descriptors:
        descriptor = descriptors.pop()
        if unlocks:  # arrays may live on, and their mapping has the same open file
            with suppress(OSError):  # it was not locked, either
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _listens(pid: int, ports: set[int]) -> bool:
    """True when a process of this machine listens at one of the ports."""
    import psutil

    with suppress(psutil.Error):  # another user's process, or it ended
        found = psutil.Process(pid).net_connections("tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port in ports for one in found)
    return False
