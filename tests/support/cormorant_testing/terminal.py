"""The command line on a terminal, as a person sees it."""

import codecs
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_WAIT_S = 60.0


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
        deadline = time.monotonic() + _WAIT_S
        while not is_seen(self.seen):
            assert time.monotonic() < deadline, self.seen
            assert self._reader.is_alive(), f"it has ended: {self.seen}"
            time.sleep(0.1)

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(30)
        self._reader.join(10)
        return code
