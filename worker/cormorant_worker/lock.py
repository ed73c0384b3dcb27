"""One writer a folder: a lock file that names who has it. For datasets, and for what a head keeps.

The lock is `flock`: the kernel drops it with the process, however that ends, and NFS, CephFS and SMB pass it on to
other machines. Some mounts of object stores have none: then nothing keeps two writers apart, and the log says so.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import structlog

log = structlog.get_logger()

LOCK_FILE = ".lock"
_UNSUPPORTED = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_LONGEST_HOLDER = 4096


class LockHeld(Exception):
    """Another process has the folder; the message names it."""


class FolderLock:
    """A folder that no other process writes to, until `release` or the end of this process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock, and make the folder if there is none.

        Raises:
            LockHeld: another process has it.
            OSError: the folder cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK_FILE
        while True:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._take(folder)
                if self._is_current():
                    break
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # its last holder removed it meanwhile: our file is no longer linked
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)

    def release(self) -> None:
        """Let others have the folder. May be called twice."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1

    def _take(self, folder: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld(f"{folder} is in use by {_holder(self._descriptor)}") from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning("folder_not_locked", folder=str(folder), reason=error.strerror)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False


def _holder(descriptor: int) -> str:
    try:
        found = json.loads(os.pread(descriptor, _LONGEST_HOLDER, 0))
        return f"process {int(found['pid'])} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
