"""Messages between a SubprocessVectorEnv and one child: length-prefixed pickles over the child's socket, and
single bytes over a pipe for what happens at every step.

    parent                                   child
    BuildRequest                  ->
                           <-                BuildReply                (or ChildFailed)
    MAP                    ->                maps the shared block
    RESET, Reset           ->                resets, clears its pending byte
    STEP_SIDE_0 | _1       ->                steps, clears its pending byte
    SAVE                   ->
                           <-                Saved
    LOAD, Saved            ->                clears its pending byte, after StateRefused if it cannot take the state
    CLOSE (or end of file) ->                closes its environment and exits

A child that fails sends ChildFailed instead, at any time, and exits. Both ends are ours, so pickle is safe.
"""

import pickle
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, Literal

from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.info import InfoField
from cormorant_worker.spaces import Space

STEP = (b"0", b"1")
"""Step, and write into this side."""
MAP, RESET, SAVE, LOAD, CLOSE = b"m", b"r", b"s", b"l", b"c"

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """The first message to a child."""

    factory: EnvSource
    row: int
    num_envs: int
    info: tuple[InfoField, ...] = ()
    """What of `info` is stored, complete or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReply:
    pid: int
    observation_space: Space
    action_space: Space
    info: tuple[InfoField, ...] = ()
    """Complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Begin an episode and write its first observation into a side."""

    seed: int | None
    side: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What `save_env` returned, or why it could not."""

    state: list[Any] = field(default_factory=list)
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFailed:
    """The last message of a child."""

    kind: Literal["raised", "bad_observation", "unknown_env", "build"]
    what: str
    """ "raised ValueError: ..." for kind raised, else a whole sentence."""
    steps: int
    details: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRefused:
    """The environment did not take a state; the child goes on."""

    what: str


Message = BuildRequest | BuildReply | Reset | Saved | StateRefused | ChildFailed


def send_message(connection: socket.socket, message: Message) -> None:
    """Send one message; waits while the socket is full."""
    data = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> Any:
    """Receive one message.

    Raises:
        EOFError: the other end is gone.
        TimeoutError: nothing came within the socket's timeout.
    """
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return pickle.loads(_receive(connection, length))  # noqa: S301 - from our own child or parent


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        try:
            part = connection.recv(length - len(data))
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if not part:
            raise EOFError("the other end closed the connection")
        data += part
    return bytes(data)
