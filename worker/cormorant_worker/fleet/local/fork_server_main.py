"""The process that forks workers: `python -m cormorant_worker.fleet.local.fork_server_main SOCKET`.

It imports, and runs neither threads nor code of users: a fork of it is as good as a process that was just started.
"""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from cormorant_worker.fleet.local.fork_server import ExitStatus, ForkRequest, Order
from cormorant_worker.fleet.local.worker_main import run_worker

_NUM_DESCRIPTORS = 4
_IDLE_S = 1.0


class Children:
    """Workers by number: their process ids, then their return codes."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._forgotten: set[int] = set()

    def add(self, number: int, pid: int) -> None:
        self._pids[number] = pid

    def return_code(self, number: int) -> int | None:
        """How a worker ended; None while it runs."""
        if number in self._pids and number not in self._codes:
            pid, status = os.waitpid(self._pids[number], os.WNOHANG)
            if pid:
                self._codes[number] = os.waitstatus_to_exitcode(status)
        return self._codes.get(number)

    def kill(self, number: int) -> None:
        # The dead keep their ids until `return_code` takes note of their end: no stranger has this one.
        if number in self._pids and self.return_code(number) is None:
            os.kill(self._pids[number], signal.SIGKILL)

    def forget(self, number: int) -> None:
        """This one is not asked for again."""
        if number in self._pids:
            self._forgotten.add(number)
        self.reap()

    def reap(self) -> None:
        """Let go of those who ended and are forgotten."""
        for number in [number for number in self._forgotten if self.return_code(number) is not None]:
            self._forgotten.discard(number)
            del self._pids[number], self._codes[number]


def main() -> int:
    """Fork until the last fleet is gone. Every fork returns its worker's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    gc.collect()
    gc.freeze()  # forks share these pages for as long as their references are not counted
    forked = _serve(connection, Children())
    connection.close()
    return 0 if forked is None else _become_worker(*forked)


def _serve(connection: Connection, children: Children) -> tuple[ForkRequest, list[int]] | None:
    """Returns in each fork, and with None at the end."""
    wanted: dict[str, None] = {}
    try:
        while True:
            if not connection.poll(_IDLE_S):
                children.reap()
                _import(wanted)
                wanted.clear()
                continue
            message = connection.recv()
            match message:
                case Order(what="status"):
                    connection.send(ExitStatus(message.number, children.return_code(message.number)))
                case Order(what="kill"):
                    children.kill(message.number)
                case Order():
                    children.forget(message.number)
                case ForkRequest():
                    descriptors = [recv_handle(connection) for _ in range(_NUM_DESCRIPTORS)]
                    _import(message.imports.now)
                    wanted.update(dict.fromkeys(message.imports.when_idle))
                    pid = os.fork()
                    if not pid:
                        return message, descriptors
                    children.add(message.number, pid)
                    for descriptor in descriptors:
                        os.close(descriptor)
    except (EOFError, OSError):
        return None


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        with suppress(Exception):  # a worker that needs it finds it out for itself, and says so
            importlib.import_module(module)


def _become_worker(request: ForkRequest, descriptors: Sequence[int]) -> int:
    data, control, heartbeat, output = descriptors
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
    return run_worker(data, control, heartbeat)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # EnvPool's threads and gymnasium's atexit handlers have nothing left to do
