"""Whether a head answers, and why `ray start` ended, in a sentence derived from its last output."""

import errno
import socket
import threading
from queue import Empty, SimpleQueue
from typing import Literal

_AUTH = ("InvalidAuthToken", "Unauthenticated", "UNAUTHENTICATED", "AuthenticationError", "Authentication failed")
_VERSION = "Version mismatch"
_STARVED = (
    "failed to check the health of this node",
    "GCS consider this node to be dead",
    "Failed to connect to GCS within",
    "Failed to start GCS",
    "The current node timed out during startup",
    # A raylet that gives up, because the GCS gave it up or does not answer, loses its last words half of the time.
    "END raylet.out tail (exit code(s)=1)",
)
"""Ray's words for its own head when nothing but CPU time was missing: the GCS runs on the same node."""
_LONGEST = 300
_CONNECT_S = 1.0
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""A node that is gone without a word is noticed after 25 s. The kernel answers, so a frozen head stays."""


Cause = Literal["token", "version", "ended"]
"""Why Ray ended. token and version: the same pod will fail again."""


class HeadWatch:
    """An idle connection to a head: it ends with the head's Ray, which Ray itself takes half a minute to notice."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = self._peer = address
        self._connection: socket.socket | None = None

    def connect(self, *, limit_s: float) -> str:
        """Connect to the head. Returns the reason for a failure, or "". A DNS server that does not answer blocks its
        caller for minutes, so the attempt runs in a thread that is abandoned at the limit.
        """
        self.close()
        answer: SimpleQueue[socket.socket | OSError] = SimpleQueue()

        def try_it() -> None:
            try:
                answer.put(_connect(self._address))
            except OSError as error:
                answer.put(error)

        threading.Thread(target=try_it, name="probe-head", daemon=True).start()
        try:
            connected = answer.get(timeout=limit_s)
        except Empty:
            return f"no answer within {limit_s:.0f} s"
        if isinstance(connected, OSError):
            return str(connected) or type(connected).__name__
        self._connection, self._peer = connected, connected.getpeername()[:2]
        return ""

    def is_head_gone(self) -> bool:
        """Whether the connection has ended and the address refuses another one. No response does not count."""
        try:
            # Ray's head may say something, and closes connections that do not answer: that is not its end.
            if self._connection is not None and self._connection.recv(1 << 16):
                return False
        except BlockingIOError:
            return False
        except OSError as error:
            if isinstance(error, TimeoutError):  # its node has acknowledged nothing for 25 s
                return True
        self.close()
        try:
            # Without a name that a DNS server would have to know.
            self._connection = _connect(self._peer)
        except OSError as error:
            return error.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
        return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connect(address: tuple[str, int]) -> socket.socket:
    """A connection that does not block."""
    connection = socket.create_connection(address, timeout=_CONNECT_S)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def has_starved(last_words: str) -> bool:
    """Whether a head's Ray ended because its processes got no CPU time."""
    return any(sign in last_words for sign in _STARVED)


def diagnose(last_words: str, *, code: int | None, head: str, has_joined: bool) -> tuple[Cause, str]:
    """Why Ray ended, also in a sentence, from the end of its output and its exit code."""
    if has_joined:
        # A raylet that meets another head than its own calls that an authentication error, too.
        return "ended", (
            f"Ray left the cluster of {head} (exit code {code}): its head is gone, or lost contact with this node"
        )
    words = " ".join(last_words.split())
    if any(sign in words for sign in _AUTH):
        return "token", (
            f"the head at {head} refuses this pod's token; RAY_AUTH_TOKEN must be the one in the job's Secret, and "
            "RAY_AUTH_MODE must be token in all pods; if that Secret is newer than the head, delete the head's pod"
        )
    if _VERSION in words:
        return "version", (
            f"the head at {head} runs another version of Ray or Python; all pods of a job need one image: "
            f"{words[words.index(_VERSION) :][:_LONGEST]}"
        )
    return "ended", f"this node did not join the head at {head} in time"
