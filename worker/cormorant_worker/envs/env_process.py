"""Starting, waking and ending the process of one environment: the parent's end of `channel`."""

import contextlib
import os
import signal
import socket
import time
from typing import Any

from cormorant_worker.envs.channel import BuildRequest
from cormorant_worker.fork_server import ENVIRONMENTS, fork_server
from cormorant_worker.wire.messages import MessageSocket

_MESSAGE_TIMEOUT_S = 10.0
"""How long the rest of a message may take once it began."""
_KILL_TIMEOUT_S = 5.0


class EnvProcess:
    """One child. Started by the constructor, which returns at once; ended by `kill`, or CLOSE and `join`.

    Args:
        build: what to build.
        block: descriptor of the memory that all children of a SubprocessVectorEnv share.
        report: writing end of the pipe by which children wake their parent.
    """

    def __init__(self, build: BuildRequest, *, block: int, report: int) -> None:
        self.row = build.row
        ours, theirs = socket.socketpair()
        ours.settimeout(_MESSAGE_TIMEOUT_S)
        self.connection = MessageSocket(ours)
        wake, self.wake_descriptor = os.pipe()
        """Write one byte to wake the child."""
        self._fork_server = fork_server(ENVIRONMENTS)
        with theirs:
            self._number = self._fork_server.fork(f"env-{build.row}", (theirs.fileno(), wake, block, report))
        os.close(wake)
        self.is_running = True
        self._send(build)

    @property
    def pid(self) -> int:
        return self._fork_server.status(self._number).pid

    def wake(self, command: bytes, message: Any = None) -> None:
        """Send one command, and the message that belongs to it. A child that is gone is found by `receive`."""
        if not self.is_running:  # the descriptor may already belong to another file
            return
        with contextlib.suppress(OSError):
            os.write(self.wake_descriptor, command)
        if message is not None:
            self._send(message)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # gone: `receive` finds out
            self.connection.send(message)

    def receive(self) -> Any:
        """Receive one message.

        Raises:
            EOFError: the child is gone, or sends nothing more.
        """
        try:
            return self.connection.receive()[0]
        except OSError as error:
            raise EOFError(str(error)) from error

    def ending(self) -> str:
        """How it ended: "exited with code 7", "was killed by SIGKILL". Called after `receive` raised EOFError."""
        code = self._fork_server.wait(self._number, 1.0)
        if code is None:
            return self._fork_server.describe_end() or "closed its connection"
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def kill(self) -> None:
        """End it and what it started, at once. May be called twice."""
        if not self.is_running:
            return
        self.is_running = False
        self._fork_server.kill(self._number)
        # In an uninterruptible system call even SIGKILL waits: then it is left to the kernel, and to the fork server.
        self._fork_server.wait(self._number, _KILL_TIMEOUT_S)
        self._fork_server.forget(self._number)
        self.connection.close()
        os.close(self.wake_descriptor)

    def join(self, *, deadline: float) -> None:
        """Wait for its end until `deadline` (time.monotonic), then kill it."""
        if self.is_running:
            self._fork_server.wait(self._number, max(0.0, deadline - time.monotonic()))
            self.kill()
