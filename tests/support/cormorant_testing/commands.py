"""The real command in a process of its own, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
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
            start_new_session=True,
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
        """A terminal's Ctrl-C is for the whole group of processes, another signal for the command alone."""
        self.children()
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)

    def end(self, timeout_s: float = START_S) -> tuple[int, str, str]:
        """Wait for its end: exit code, the rest of stdout, stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def orphans(self) -> list[psutil.Process]:
        """Processes that were below it and live on."""
        _, alive = psutil.wait_procs(self._children, timeout=10)
        return [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
