"""Python scripts in a process of their own, and whatever processes they leave behind."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with its import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


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


def start_server(command: Sequence[str], url: str, *, log: Path) -> "subprocess.Popen[bytes]":
    """Run a server that writes to `log`, and wait until it answers at `url`, with whatever status."""
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def answers() -> bool:
        assert process.poll() is None, f"{command} ended with {process.returncode}: {log.read_text()[-2000:]}"
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    until(answers)
    return process


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


def until(what: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait until something is true, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:.0f} s"
        time.sleep(0.05)


def unused_port() -> int:
    """A port on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
