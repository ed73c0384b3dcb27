"""What a SubprocessVectorEnv and its children say and share: messages over each child's socket, single bytes over a
pipe for what happens at every step, and one block of memory for actions and steps.

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

A child that fails sends ChildFailed instead, at any time, and exits.
"""

import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from cormorant_worker.envs.env_row import EnvArrays
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.info import InfoField
from cormorant_worker.spaces import Space
from cormorant_worker.wire.arrays import ArrayCursor

STEP = (b"0", b"1")
"""Step, and write into this side."""
MAP, RESET, SAVE, LOAD, CLOSE = b"m", b"r", b"s", b"l", b"c"


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


_PENDING = b"\x01"
_LOCK = threading.Lock()


class SharedSteps:
    """The one block of memory of num_envs environments; parent and children make the same arrays from the same spaces.

    It is a nameless file, inherited by descriptor: when the last process that maps it dies, it is gone.

        pending   [n] bytes: 1 while a row is being stepped or reset, set by the parent, cleared by the child
        actions   written by the parent
        illegal   written by the children, read while they are idle
        sides     two in turn: what `recv` handed out stays as it is until the next `recv`

    Args:
        descriptor: from `anonymous_file`; stays the caller's to close.
        create: give the file its size; exactly one process does, before all others map it.
    """

    def __init__(
        self,
        descriptor: int,
        observation_space: Space,
        action_space: Space,
        num_envs: int,
        info: Sequence[InfoField],
        *,
        create: bool,
    ) -> None:
        self._num_envs = num_envs

        def lay_out(cursor: ArrayCursor) -> None:
            self.pending = cursor.take((num_envs,), np.dtype(np.uint8))
            self.arrays = EnvArrays.take(observation_space, action_space, num_envs, info, cursor.take, num_sides=2)

        lay_out(measure := ArrayCursor())
        if create:
            os.ftruncate(descriptor, measure.size_bytes)
        self._map = mmap.mmap(descriptor, measure.size_bytes)
        lay_out(ArrayCursor(self._map))

    def is_settled(self) -> bool:
        return self._map.find(_PENDING, 0, self._num_envs) < 0

    def settle(self, row: int) -> bool:
        """Called by a child: `row` is done and written. Returns whether it was the last one.

        Two children that finish at the same instant both get True, or, on a processor that reorders, could both get
        False were it not for the fences; the parent looks for itself now and then, so nothing rests on them.
        """
        # The lock's atomic operations are fences: what is written before is seen before what is written after.
        with _LOCK:
            pass
        self._map[row] = 0
        with _LOCK:
            pass
        return self.is_settled()
