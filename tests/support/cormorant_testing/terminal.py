"""The command line on a terminal, as a person sees it."""

import codecs
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

_WAIT_S = 60.0
_LAST_WORDS_S = 30.0


class Terminal:
    """One command that runs on a pseudo-terminal. Use as a context manager."""

    def __init__(self, *arguments: str, columns: int = 160) -> None:
        self.seen = ""
        """Everything that it wrote, control sequences too."""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "20"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cormorant_cli", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._ours)

    def read_until(self, is_seen: Callable[[str], object], *, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Read until what was seen says so.

        Args:
            is_seen: gets everything that was written.
            meanwhile: called about once a second or more often.
        """
        deadline = time.monotonic() + _WAIT_S
        while not is_seen(self.seen):
            assert time.monotonic() < deadline, self.seen
            assert self._read(1.0), f"it has ended: {self.seen}"
            meanwhile()

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline and self._read(1.0):
            continue
        return self._process.wait(_LAST_WORDS_S)

    def _read(self, timeout_s: float) -> bool:
        """False when the terminal's other end is closed."""
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return True
        try:
            self.seen += self._decoder.decode(os.read(self._ours, 65536))
        except OSError:
            return False
        return True
