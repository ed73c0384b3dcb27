"""What a fork server does: `run(become)` is the whole of its `python -m MODULE SOCKET`.

It imports, and runs neither threads nor code of users: a fork of it is as good as a process that was just started.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from cormorant_worker.fork_server import ChildStatus, ForkRequest, Order
from cormorant_worker.wire.messages import MessageSocket

_IDLE_S = 1.0


class _Children:
    """Children by number: their process ids, then their return codes."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._forgotten: set[int] = set()

    def add(self, number: int, pid: int) -> None:
        self._pids[number] = pid

    def add_unborn(self, number: int) -> None:
        """The system refused to fork this one."""
        self._codes[number] = 1

    def status(self, number: int) -> ChildStatus:
        pid = self._pids.get(number, 0)
        has_ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if pid and number not in self._codes and os.waitid(os.P_PID, pid, has_ended) is not None:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)  # what it started and left; the group's id is its own until it is reaped
            self._codes[number] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return ChildStatus(number, pid, self._codes.get(number))

    def kill(self, number: int) -> None:
        # The dead keep their ids until `status` takes note of their end: no stranger has this one.
        if number in self._pids and self.status(number).code is None:
            for kill in (os.killpg, os.kill):  # at first it is not a group yet
                with suppress(OSError):
                    kill(self._pids[number], signal.SIGKILL)

    def forget(self, number: int) -> None:
        """This one is not asked for again."""
        if number in self._pids:
            self._forgotten.add(number)
        self.reap()

    def reap(self) -> None:
        """Let go of those who ended and are forgotten."""
        for number in [number for number in self._forgotten if self.status(number).code is not None]:
            self._forgotten.discard(number)
            del self._pids[number], self._codes[number]


def run(become: Callable[..., int]) -> NoReturn:
    """Fork until the other end of the socket is closed. Every fork ends with what `become(*descriptors)` returns."""
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
    """Returns in each fork, and with None at the end."""
    wanted: dict[str, None] = {}
    try:
        while True:
            if not connection.wait(_IDLE_S):
                children.reap()
                _import(wanted)
                wanted.clear()
                continue
            message, descriptors = connection.receive()
            match message:
                case Order(what="status"):
                    connection.send(children.status(message.number))
                case Order(what="kill"):
                    children.kill(message.number)
                case Order():
                    children.forget(message.number)
                case ForkRequest():
                    _import(message.imports.now)
                    wanted.update(dict.fromkeys(message.imports.when_idle))
                    try:
                        pid = os.fork()
                    except OSError as error:
                        children.add_unborn(message.number)
                        os.write(descriptors[-1], f"cannot fork {message.name}: {error}; raise the limit\n".encode())
                    else:
                        if not pid:
                            return message, descriptors
                        children.add(message.number, pid)
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
