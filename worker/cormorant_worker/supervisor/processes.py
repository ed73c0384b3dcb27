"""Duties of process 1 of a pod: its children are reaped and never survive it."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil
import structlog

log = structlog.get_logger()

_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
_TAIL_LINES = 100
_SIGNAL_BASE = 128
"""A process that signal n ended has the exit code 128 + n."""


class Child:
    """A process whose output is read continuously; its last lines are kept."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, watch_for: str) -> None:
        """Start it. `watch_for`: `has_said` becomes true when a line of its output contains this."""
        self.has_said = False
        self.started = time.monotonic()
        self._watch_for = watch_for
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name="ray-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, 128 + n after signal n; None while it runs."""
        return exit_code(self._process.poll())

    def lived_s(self) -> float:
        return time.monotonic() - self.started

    def output_tail(self) -> str:
        """Last lines of its output, complete once it has ended."""
        if self._process.poll() is not None:
            self._reader.join(1.0)  # what it started may hold the pipe open for longer
        return "\n".join(tuple(self._tail))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._watch_for in line:
                self.has_said = True
            if line.strip():
                self._tail.append(line.rstrip())


def exit_code(code: int | None) -> int | None:
    """A subprocess's return code as shells and Kubernetes write it."""
    return code if code is None or code >= 0 else _SIGNAL_BASE - code


def adopt_orphans() -> None:
    """Become the parent of orphans of children, as process 1 always is. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(known: Sequence[int]) -> None:
    """Reap ended children that no other code waits for. `known`: process ids that other code waits for."""
    with suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return  # one system call, ten times a second; scanning all processes costs more
    # `waitid` shows only one of the ended at a time, and always the same until it is reaped.
    for pid in [process.pid for process in psutil.Process().children() if _is_zombie(process)]:
        if pid not in known:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill_all(known: Sequence[int]) -> bool:
    """Kill every descendant process. False: some were left after ten seconds."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        reap(known)
        left = [process for process in descendants() if process.pid not in known or not _is_zombie(process)]
        if not left:
            return True
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    log.error("processes_left", reason="Ray processes survive SIGKILL: they are blocked in the kernel")
    return False


def descendants() -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True
