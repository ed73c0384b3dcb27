"""A process that imports once and forks workers (`fleet/local/worker_main.py`) or environments (`envs/child.py`).

    ForkRequest, descriptors -> fork server --fork--> child, child ...
    Order ---------------------->   | <--waits for them--

Each process has one fork server of a kind, started when it is first needed (decision 0031). It ends with its process,
however that ends. `run` is the program of the fork server, `python -m MODULE SOCKET`: it imports, and runs neither
threads nor user code, so that a fork of it is equivalent to a newly started process.
"""

import atexit
import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from cormorant_worker.wire import MessageSocket

WORKERS = "cormorant_worker.fleet.local.worker_main"
ENVIRONMENTS = "cormorant_worker.envs.child"
_ANSWER_S = 5.0
"""A fork server that has imported answers in microseconds."""
_ASKED_EVERY_S = 0.002
_IDLE_S = 1.0
_ENDING_S = 1.0
_PR_SET_PDEATHSIG = 1
_LIBRARIES = ("OMP", "MKL", "OPENBLAS", "NUMEXPR")


@dataclass(frozen=True)
class Imports:
    """Modules that children of a kind need. None of them may start threads when imported."""

    now: tuple[str, ...] = ()
    """Before the fork."""
    when_idle: tuple[str, ...] = ()
    """Imported when idle, for later children that may need them."""


@dataclass(frozen=True)
class ForkRequest:
    """A child to fork. Sent with the child's descriptors, the last of which is its output."""

    number: int
    name: str
    """Shown by ps and top."""
    imports: Imports
    """Modules that its siblings will need as well."""
    folder: str
    path: Sequence[str]
    """Import path of its modules."""
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Order:
    """Command about one child: report how it ended, or kill its process group."""

    what: Literal["status", "kill"]
    number: int


@dataclass(frozen=True)
class ChildStatus:
    number: int
    pid: int
    """0: not forked yet."""
    code: int | None
    """Return code as in `subprocess`, negative for a signal; None: running, or not forked yet."""


class ForkServer:
    """The process and the socket to it. Thread-safe."""

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
        """Fork a child in its own process group, with copies of the descriptors, without waiting for it. If the fork
        server is gone, the child's sockets close. `name`: shown by ps and top; `imports`: modules that it and its
        siblings need. Returns the child's number in this process.
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
        """Whether a child runs, and how it ended. Without a pid if the pid is unknown."""
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
        """Wait for a child's end. Returns its code as in `status`; None: it runs, or the fork server is gone."""
        deadline = time.monotonic() + timeout_s
        while (code := self.status(number).code) is None and time.monotonic() < deadline and self.is_alive:
            time.sleep(_ASKED_EVERY_S)
        return code

    def kill(self, number: int) -> None:
        """Kill a child and its process group, unless it, or the fork server, has ended. Does not wait."""
        with self._lock, suppress(OSError):
            self._connection.send(Order("kill", number))

    def describe_end(self, number: int) -> str:
        """How a child ended, as a clause: "was killed by SIGKILL". Waits briefly for the end after its sockets'."""
        code = self.wait(number, _ENDING_S)
        if code is None:
            own = self._process.poll()
            return "closed its connection" if own is None else f"went with the process that forks it (exit code {own})"
        if code >= 0:
            return f"exited with code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def close(self) -> None:
        """End the fork server, and with it its children; wait for it."""
        self._connection.close()
        try:
            self._process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()  # in the middle of its imports
            self._process.wait(timeout=10)


_starting = threading.Lock()
"""Guards the fork servers of this process."""
_started: dict[tuple[int, str], ForkServer] = {}
"""By process, which a fork of it is not, and by module."""


def fork_server(module: str) -> ForkServer:
    """The fork server of this process for a kind of children, started if there is none or it has ended."""
    key = os.getpid(), module
    with _starting:
        server = _started.get(key)
        if server is None or not server.is_alive:
            server = _started[key] = ForkServer(module)
            atexit.register(server.close)
        return server


def _environment() -> dict[str, str]:
    """Variables of children: this process's, one thread for each library, and the script's import path."""
    path = os.pathsep.join(_path())
    return {**os.environ, "PYTHONPATH": path, **{f"{library}_NUM_THREADS": "1" for library in _LIBRARIES}}


def _path() -> list[str]:
    """Import path of this process. Notebooks and standard input have "" for the working directory."""
    return [path or _folder() for path in sys.path]


def _folder() -> str:
    """The working directory; the root where it was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "/"


@contextmanager
def _output() -> Iterator[int]:
    """A descriptor of what children write to: stderr, the process's own where a program replaced it, or nothing."""
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


# -- the other side ----------------------------------------------------------------------------------------------


class _Children:
    """Children by number: their process ids, then their return codes."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}

    def status(self, number: int) -> ChildStatus:
        pid = self.pids.get(number, 0)
        has_ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if pid and number not in self.codes and os.waitid(os.P_PID, pid, has_ended) is not None:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)  # what it started and left; the group's id is its own until it is reaped
            self.codes[number] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return ChildStatus(number, pid, self.codes.get(number))

    def kill(self, number: int) -> None:
        # The dead keep their ids until `status` takes note of their end: no stranger has this one.
        if number in self.pids and self.status(number).code is None:
            for kill in (os.killpg, os.kill):  # at first it is not a group yet
                with suppress(OSError):
                    kill(self.pids[number], signal.SIGKILL)


def run(become: Callable[..., int]) -> NoReturn:
    """Fork until the other end of the socket is closed. Each child exits with the result of `become(*descriptors)`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it would have us lose how children ended
    connection = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    gc.collect()
    gc.freeze()  # forks share these pages for as long as their references are not counted
    forked = _serve(connection, _Children())
    connection.close()
    code = 0 if forked is None else become(*_prepare(*forked))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # EnvPool's threads and gymnasium's atexit handlers have nothing left to do


def _serve(connection: MessageSocket, children: _Children) -> tuple[ForkRequest, Sequence[int]] | None:
    # Returns in each fork, and with None at the end.
    wanted: dict[str, None] = {}
    try:
        while True:
            if not connection.wait(_IDLE_S):
                for number in children.pids.keys() - children.codes.keys():
                    children.status(number)  # the system can let go of those that have ended
                _import(wanted)
                wanted.clear()
                continue
            message, descriptors = connection.receive()
            match message:
                case Order(what="status"):
                    connection.send(children.status(message.number))
                case Order():
                    children.kill(message.number)
                case ForkRequest():
                    _import(message.imports.now)
                    wanted.update(dict.fromkeys(message.imports.when_idle))
                    try:
                        pid = os.fork()
                    except OSError as error:
                        children.codes[message.number] = 1
                        os.write(descriptors[-1], f"cannot fork {message.name}: {error}; raise the limit\n".encode())
                    else:
                        if not pid:
                            return message, descriptors
                        children.pids[message.number] = pid
                    for descriptor in descriptors:
                        os.close(descriptor)
    except OSError:
        return None


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        with suppress(Exception):  # a child that needs it finds it out for itself, and says so
            importlib.import_module(module)


def _prepare(request: ForkRequest, descriptors: Sequence[int]) -> Sequence[int]:
    """Be a process of its own. Returns the descriptors that are the child's."""
    *own, output = descriptors
    # The fork server ends with its parent: then the kernel kills this process, even in the middle of an endless step.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.setsid()
    with suppress(OSError):
        Path("/proc/self/comm").write_text(request.name)  # the system keeps 15 bytes
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[:] = request.path
    with suppress(OSError):
        os.chdir(request.folder)
    return own
