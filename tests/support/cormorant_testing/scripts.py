"""Python scripts in a process of their own, and whatever processes they leave behind."""

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import structlog


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def run_script(
    text: str, *, cwd: Path | None = None, timeout: float = 110, **more: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script to its end; `more` is added to its environment."""
    command = [sys.executable, "-c", text]
    return subprocess.run(command, env=environment(**more), cwd=cwd, capture_output=True, text=True, timeout=timeout)


def start_script(text: str, *arguments: str, **more: str) -> "subprocess.Popen[str]":
    """Run a script in a session of its own; `more` is added to its environment."""
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class Logged:
    """A process whose log is read as it comes, so that it never waits for a reader. A context manager kills it."""

    wait_s = 60.0
    """For an event that a test waits for."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self.text = ""
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if line.startswith("{") and line.endswith("}\n"):  # not what a killed process began to say
                self.lines.append(json.loads(line))

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in tuple(self.lines) if line["event"] == event]

    def wait_for(self, event: str, *, times: int = 1, seconds: float = 0) -> dict[str, Any]:
        deadline = time.monotonic() + (seconds or self.wait_s)
        while len(found := self.said(event)) < times:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)
        return found[times - 1]

    def end(self, number: int = signal.SIGTERM, *, timeout_s: float = 60) -> int:
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 60) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        self.end(signal.SIGKILL, timeout_s=30)

    def close(self) -> None:
        """After its end: let go of its log."""
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Server(Logged):
    """A server that answers at a URL, with a status below 500, by the time that it is made."""

    def __init__(self, command: Sequence[str], url: str, **options: Any) -> None:
        super().__init__(command, **options)
        until(lambda: answers(url) or self.process.poll() is not None)
        assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text[-2000:]}"


def answers(url: str) -> bool:
    """Whether a server answers there, with a status below 500."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code < 500
    except OSError:
        return False
    return True


def of_session(session: int) -> list[psutil.Process]:
    """Processes that a script started, wherever they have moved to in the tree; zombies left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


class Repeated:
    """Calls something again and again in a thread, until the block ends."""

    def __init__(self, call: Callable[[], object], *, every_s: float, unless: tuple[type[Exception], ...] = ()) -> None:
        """`unless`: exceptions after which it goes on."""
        self._call, self._every_s, self._unless = call, every_s, unless
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """May be called twice."""
        self._stop.set()
        self._thread.join(timeout=120)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            with contextlib.suppress(*self._unless):
                self._call()


def until(
    is_so: Callable[[], object], *, seconds: float = 60.0, what: str = "it did not happen", every_s: float = 0.05
) -> float:
    """Wait until something is true, at most `seconds`. Returns the seconds that it took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(every_s)
    return time.monotonic() - began


def unused_port() -> int:
    """A port that is free now, below those that connections take: many tests connect while a head starts."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports between 20,000 and 32,000 are taken")


@contextlib.contextmanager
def no_room(most: int = 0) -> Iterator[list[Any]]:
    """Inside, every write to a file beyond these bytes fails; yields what is logged."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with structlog.testing.capture_logs() as logged:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            yield logged
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
