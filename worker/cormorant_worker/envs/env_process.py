"""Starting, waking and ending the process of one environment: the parent's end of `channel`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from cormorant_worker.envs.channel import CLOSE, MAP, RESET, BuildRequest, Reset, receive_message, send_message

_MAIN = "from cormorant_worker.envs.child import main; main()"
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
_MESSAGE_TIMEOUT_S = 10.0
"""How long the rest of a message may take once it began."""
_KILL_TIMEOUT_S = 5.0


class EnvProcess:
    """One child. Started by the constructor, which returns at once; ended by `kill`, or `close` and `join`.

    Not multiprocessing's spawn: that imports the user's main script again (and torch with it), and needs a guard there.

    Args:
        build: what to build; its descriptors are inherited. Its `wake` is filled in here.
        life: reading end of a pipe that the child watches: see `die_with_parent`.
    """

    def __init__(self, build: BuildRequest, *, life: int) -> None:
        self.row = build.row
        self.connection, theirs = socket.socketpair()
        wake, self.wake_descriptor = os.pipe()
        """Write one byte to wake the child."""
        with theirs:
            parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(life), str(parent)],
                pass_fds=(theirs.fileno(), wake, life, build.block, build.report),
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout may be the parent's machine-readable output
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                process_group=0,  # Ctrl-C reaches the parent only; and we can end the environment's own children
            )
        os.close(wake)
        self.connection.settimeout(_MESSAGE_TIMEOUT_S)
        self.is_running = True
        self._send(replace(build, wake=wake))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wake(self, command: bytes) -> None:
        """Send one command. A child that is gone is found by `receive`."""
        if self.is_running:  # else the descriptor may already belong to another file
            with contextlib.suppress(OSError):
                os.write(self.wake_descriptor, command)

    def map(self) -> None:
        """Tell a child that sent BuildReply that the shared block has its size."""
        self.wake(MAP)

    def reset(self, *, seed: int | None, side: int) -> None:
        """Begin an episode; the child clears its pending byte."""
        self.command(RESET, Reset(seed=seed, side=side))

    def command(self, command: bytes, message: Any) -> None:
        self.wake(command)
        self._send(message)

    def receive(self) -> Any:
        """Receive one message.

        Raises:
            EOFError: the child is gone, or sends nothing more.
        """
        try:
            return receive_message(self.connection)
        except TimeoutError as error:
            raise EOFError("an incomplete message") from error

    def ending(self) -> str:
        """How it ended: "exited with code 7", "was killed by SIGKILL". Called after `receive` raised EOFError."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        os.close(self.wake_descriptor)
        # In an uninterruptible system call even SIGKILL waits: then it is left to the kernel, and to Popen's reaper.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)

    def close(self) -> None:
        """Ask it to close its environment and exit; `join` waits for that."""
        self.wake(CLOSE)

    def join(self, *, deadline: float) -> None:
        """Wait for its end until `deadline` (time.monotonic), then kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # gone: `receive` finds out
            send_message(self.connection, message)
