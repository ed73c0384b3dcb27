"""Messages between a SubprocessVectorEnv and one child, over the child's socket, and single bytes over a pipe for what
happens at every step.

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

from dataclasses import dataclass, field
from typing import Any, Literal

from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.info import InfoField
from cormorant_worker.spaces import Space

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
