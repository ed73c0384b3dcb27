"""A process that imports once and forks workers (`fleet/local/worker_server.py`) or environments
(`envs/child.py`).

    ForkRequest, descriptors -> fork server --fork--> child, child ...
    Order ---------------------->   | <--waits for them--

Each process has one fork server of a kind, started when it is first needed (decision 0031). It ends with its process,
however that ends. `fork_loop.py` is its other side.
"""

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cormorant_worker.wire.messages import MessageSocket

WORKERS = "cormorant_worker.fleet.local.worker_server"
ENVIRONMENTS = "cormorant_worker.envs.child"
_ANSWER_S = 5.0
"""A fork server that has imported answers in microseconds."""
_ASKED_EVERY_S = 0.002
_LIBRARIES = ("OMP", "MKL", "OPENBLAS", "NUMEXPR")


@dataclass(frozen=True)
class Imports:
    """Modules that children of a kind need. None of them may start threads as it is imported."""

    now: tuple[str, ...] = ()
    """Before the fork."""
    when_idle: tuple[str, ...] = ()
    """Some children need them, perhaps: those that come later find them."""


@dataclass(frozen=True)
class ForkRequest:
    """A child to be forked. With it come the child's descriptors, and last the one that it writes its output to."""

    number: int
    name: str
    """Shown by ps and top."""
    imports: Imports
    """What its siblings will need as well."""
    folder: str
    path: Sequence[str]
    """Where its imports are looked for."""
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Order:
    """About one child: how did it end? Kill it and its process group, if it lives. It is not asked for again."""

    what: Literal["status", "kill", "release"]
    number: int


@dataclass(frozen=True)
class ChildStatus:
    number: int
    pid: int
    """0: it is not forked yet."""
    code: int | None
    """A return code as subprocess has them, negative for a signal; None: it runs, or is not forked yet."""


class ForkServer:
    """The process and the socket to it. Used by any thread."""

    def __init__(self, module: str) -> None:
        """Start `python -m module`. It imports first; what it is told meanwhile waits in the socket."""
        ours, theirs = socket.socketpair()
        self._connection = MessageSocket(ours)
        self._lock = threading.Lock()
        """Guards the socket: a question and its answer."""
        self._number = 0
        with theirs, _output() as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                # A library that starts threads as it is imported would miss them in every fork.
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                # Ctrl-C in the terminal reaches the parent alone, which then ends its children in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, name: str, descriptors: Sequence[int], *, imports: Imports = Imports()) -> int:
        """Have a child forked, a process group of its own. Never waits for it. If the fork server is gone, the child's
        sockets close.

        Args:
            name: shown by ps and top.
            descriptors: what the child gets copies of.
            imports: what it and its siblings need.

        Returns:
            The child's number here.
        """
        with self._lock, _output() as output:
            self._number += 1
            request = ForkRequest(
                number=self._number,
                name=name,
                imports=imports,
                folder=_folder(),
                path=_path(),
                environment=_environment(),
            )
            try:
                self._connection.send(request, *descriptors, output)
            except OSError:
                self._process.kill()  # half a request may be in the socket: the next child gets another fork server
        return self._number

    def status(self, number: int) -> ChildStatus:
        """Whether a child runs, and how it ended. Without a pid if that is not known."""
        deadline = time.monotonic() + _ANSWER_S
        with self._lock, suppress(OSError):
            self._connection.send(Order("status", number))
            # An answer that came too late is still in the socket.
            while self._connection.wait(max(0.0, deadline - time.monotonic())):
                answer: ChildStatus = self._connection.receive()[0]
                if answer.number == number:
                    return answer
        return ChildStatus(number, 0, None)

    def wait(self, number: int, timeout_s: float) -> int | None:
        """Wait for a child's end. Returns its code as `status` does; None: it runs, or the fork server is gone."""
        deadline = time.monotonic() + timeout_s
        while (code := self.status(number).code) is None and time.monotonic() < deadline and self.is_alive:
            time.sleep(_ASKED_EVERY_S)
        return code

    def kill(self, number: int) -> None:
        """Have a child and its process group killed, unless it has ended. Does not wait; a fork server that has ended
        kills no child.
        """
        with self._lock, suppress(OSError):
            self._connection.send(Order("kill", number))

    def forget(self, number: int) -> None:
        """This child is not asked for again."""
        with self._lock, suppress(OSError):
            self._connection.send(Order("release", number))

    def describe_end(self) -> str:
        """How the fork server itself ended, as a clause; empty while it lives."""
        code = self._process.poll()
        return "" if code is None else f"went with the process that forks it, which ended with exit code {code}"

    def close(self) -> None:
        """End it and wait for it. Children that live go on."""
        self._connection.close()
        try:
            self._process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()  # in the middle of its imports
            self._process.wait(timeout=10)


def kill_alone(pid: int, connection: Any) -> None:
    """Kill a child whose fork server has ended, or imports for a long time: as long as it holds the other end of
    `connection`, the process with this id is the child.
    """
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(connection.fileno(), 0)
            if not any(events & select.POLLHUP for _, events in poll.poll(0)):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


_starting = threading.Lock()
"""Guards the fork servers of this process."""
_started: dict[tuple[int, str], ForkServer] = {}
"""By process, which a fork of it is not, and by module."""


def fork_server(module: str) -> ForkServer:
    """The fork server of this process for a kind of children, started where there is none or it has ended."""
    key = os.getpid(), module
    with _starting:
        found = _started.get(key)
        if found is None or not found.is_alive:
            found = _started[key] = ForkServer(module)
            atexit.register(found.close)
        return found


def _environment() -> dict[str, str]:
    """What children find in `os.environ`: what is there now, one thread for each library, and the script's own import
    path, so that entrypoints resolve in their subprocesses as they do here.
    """
    path = os.pathsep.join(_path())
    return {**os.environ, "PYTHONPATH": path, **{f"{library}_NUM_THREADS": "1" for library in _LIBRARIES}}


def _path() -> list[str]:
    """Where this process looks for imports. Notebooks and standard input have "" for the working directory."""
    return [path or _folder() for path in sys.path]


def _folder() -> str:
    """The working directory; the root where it was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "/"


@contextmanager
def _output() -> Iterator[int]:
    """A descriptor of what children write to: stderr, that of the process where a program replaced it, or nothing where
    both are closed.
    """
    streams: tuple[Any, ...] = sys.stderr, sys.__stderr__
    for stream in streams:
        with suppress(AttributeError, OSError, ValueError):
            descriptor = os.dup(stream.fileno())
            break
    else:
        descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
