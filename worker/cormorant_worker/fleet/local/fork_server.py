"""The process that forks workers, as fleets hold it: what a worker imports is imported once, not once a worker.

    fleets ──ForkRequest, descriptors──> fork server ──fork──> worker, worker ...
           ──Order────────────────────────>   │ <──waits for them──┘

All fleets of a process share one (decision 0031). It ends with the last of them, and with their process, however that
ends. `fork_server_main.py` is its other side.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, Literal

from cormorant_worker.fleet.local.channel import socket_pair

_MODULE = "cormorant_worker.fleet.local.fork_server_main"
_ANSWER_S = 5.0
"""One that has imported answers in microseconds."""


@dataclass(frozen=True)
class Imports:
    """Modules that workers of a kind need. None of them may start threads as it is imported."""

    now: tuple[str, ...] = ()
    """Before the fork."""
    when_idle: tuple[str, ...] = ()
    """Some workers need them, perhaps: those that come later find them."""


@dataclass(frozen=True)
class ForkRequest:
    """A worker to be forked. Its descriptors follow: data, control, heartbeat, and what it writes to."""

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
    """About one worker: how did it end? kill it, if it lives; it is not asked for again."""

    what: Literal["status", "kill", "release"]
    number: int


@dataclass(frozen=True)
class ExitStatus:
    """A return code as subprocess has them, negative for a signal; None: it runs, or is not forked yet."""

    number: int
    code: int | None


class ForkServer:
    """The process and the socket to it. Used by any thread."""

    def __init__(self) -> None:
        """Start the process. It imports first; what it is told meanwhile waits in the socket."""
        self._connection, theirs = socket_pair()
        self._lock = threading.Lock()
        """Guards the socket: a question and its answer, a request and its descriptors."""
        self._number = 0
        # A library that starts threads as it is imported would miss them in every fork.
        environment = {"OPENBLAS_NUM_THREADS": "1", **_environment()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Ctrl-C in the terminal reaches the fleet alone, which then drains its workers.
            start_new_session=True,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can fork workers."""
        return self._process.poll() is None

    def fork(self, name: str, descriptors: Sequence[int], *, imports: Imports) -> int:
        """Have a worker forked. Never waits for it. If the fork server is gone, the worker's sockets close.

        Args:
            name: shown by ps and top.
            descriptors: of its data socket, its control socket and its heartbeat; the fork server gets copies.
            imports: what it and its siblings need.

        Returns:
            The worker's number here.
        """
        with self._lock, _output() as output, suppress(OSError):
            self._number += 1
            request = ForkRequest(
                number=self._number,
                name=name,
                imports=imports,
                folder=str(Path.cwd()),
                path=[path for path in sys.path if path],
                environment=_environment(),
            )
            self._connection.send(request)
            for descriptor in (*descriptors, output):
                send_handle(self._connection, descriptor, self.pid)
        return self._number

    def return_code(self, number: int) -> int | None:
        """How a worker ended, negative for a signal. None while it runs or is not forked yet, and if not known."""
        deadline = time.monotonic() + _ANSWER_S
        with self._lock, suppress(OSError, EOFError):
            self._connection.send(Order("status", number))
            # An answer that came too late is still in the socket.
            while self._connection.poll(max(0.0, deadline - time.monotonic())):
                answer: ExitStatus = self._connection.recv()
                if answer.number == number:
                    return answer.code
        return None

    def kill(self, number: int) -> None:
        """Have a worker killed, unless it has ended. Does not wait; a fork server that has ended kills no worker."""
        with self._lock, suppress(OSError):
            self._connection.send(Order("kill", number))

    def forget(self, number: int) -> None:
        """This worker is not asked for again."""
        with self._lock, suppress(OSError):
            self._connection.send(Order("release", number))

    def describe_end(self) -> str:
        """How the fork server itself ended, as a clause; empty while it lives."""
        code = self._process.poll()
        return "" if code is None else f"went with the process that forks workers, which ended with exit code {code}"

    def close(self) -> None:
        """End it and wait for it. Workers that live go on."""
        self._connection.close()
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()  # in the middle of its imports
            self._process.wait(timeout=10)


_borrowing = threading.Lock()
"""Guards who holds this process's fork servers, the newest last."""
_holders: dict[ForkServer, int] = {}


def borrow() -> ForkServer:
    """The fork server of this process, started where there is none or it has ended. Give it back."""
    with _borrowing:
        newest = next(reversed(_holders), None)
        if newest is None or not newest.is_alive:
            newest = ForkServer()
        _holders[newest] = _holders.get(newest, 0) + 1
        return newest


def give_back(fork_server: ForkServer) -> None:
    """The last one who gives it back ends it."""
    with _borrowing:
        _holders[fork_server] -= 1
        if _holders[fork_server]:
            return
        del _holders[fork_server]
    fork_server.close()


def _environment() -> dict[str, str]:
    """What workers find in `os.environ`: what is there now, and the script's own import path, so that entrypoints
    resolve in their subprocesses as they do here.
    """
    path = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@contextmanager
def _output() -> Iterator[int]:
    """The descriptor that workers write to: that of stderr, or of nothing where a program has taken it away."""
    stream: Any = sys.stderr
    with ExitStack() as stack:
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):
            descriptor = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, descriptor)
        yield descriptor
