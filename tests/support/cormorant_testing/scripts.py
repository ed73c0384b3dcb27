"""Python scripts in a process of their own, and whatever processes they leave behind."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

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
