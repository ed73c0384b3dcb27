"""The real command in a process of its own: what it leaves behind, and how it looks on a terminal."""

import codecs
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

START_S = 120
"""A worker's start takes 4 s on an idle machine; a busy one takes many times that."""

Started = Callable[..., "Command"]
Written = Callable[..., Path]


class Command:
    def __init__(self, *arguments: str, cwd: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cormorant_cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self._children: list[psutil.Process] = []

    def wait_for_event(self, name: str) -> dict[str, Any]:
        """Read stdout up to an event of a `--json` run."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"no {name} event; stderr: {self.process.communicate()[1]}")

    def children(self) -> list[psutil.Process]:
        self._children = psutil.Process(self.process.pid).children(recursive=True)
        return self._children

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.children()
        os.kill(self.process.pid, number)

    def end(self, timeout_s: float = START_S) -> tuple[int, str, str]:
        """Wait for its end: exit code, the rest of stdout, stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def orphans(self) -> list[psutil.Process]:
        """Processes that were below it and live on."""
        _, alive = psutil.wait_procs(self._children, timeout=10)
        return [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


class Terminal:
    """One command that runs on a pseudo-terminal. Use as a context manager."""

    def __init__(self, *arguments: str) -> None:
        self.seen = ""
        """Everything that it wrote, control sequences too."""
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "20"}
        command = [sys.executable, "-m", "cormorant_cli", *arguments]
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)
        os.close(self._ours)

    def _read(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")().decode
        with suppress(OSError):  # the other end was closed
            while True:
                self.seen += decode(os.read(self._ours, 65536))

    def read_until(self, is_seen: Callable[[str], object]) -> None:
        """Wait until everything that was written says so."""
        deadline = time.monotonic() + START_S
        while not is_seen(self.seen):
            assert time.monotonic() < deadline, self.seen
            assert self._reader.is_alive(), f"it has ended: {self.seen}"
            time.sleep(0.1)

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(30)
        self._reader.join(10)
        return code
