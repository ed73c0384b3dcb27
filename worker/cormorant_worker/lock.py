"""One writer per folder: a lock file that names its holder. Used for datasets and for the head's directory.

The lock is `flock`: the kernel drops it with the process, and NFS, CephFS and SMB pass it on to other machines. A mount
without it is refused: a file that is renewed while its holder lives cannot tell a dead holder from a slow one.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

LOCK_FILE = ".lock"
_UNSUPPORTED = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_LONGEST_HOLDER = 4096


class LockHeld(Exception):
    """Another process holds the folder; the message names it."""


class LocksUnsupported(OSError):
    """The file system has no `flock`."""


class FolderLock:
    """Keeps other processes from writing to a folder, until `release` or the end of this process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock; creates the folder. Raises LockHeld, LocksUnsupported, or another OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = "another process"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads(os.pread(self._descriptor, _LONGEST_HOLDER, 0))
                who = f"process {int(found['pid'])} on {found['host']} since {found['since']}"
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise LockHeld(f"{folder} is in use by {who}") from None
            if error.errno not in _UNSUPPORTED:
                raise
            raise LocksUnsupported(
                f"{folder} is on a file system without file locks (flock: {error.strerror}), where two writers would "
                "mix their files; use a local disk, NFSv4 or CephFS; a dataset may also have an s3:// or gs:// URI"
            ) from error
        since = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)

    def release(self) -> None:
        """Release the lock; the file stays. May be called twice."""
        if self._descriptor >= 0:
            # Closing it is not enough: a process that was forked meanwhile has it open, too.
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1
