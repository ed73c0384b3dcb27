"""What every engine offers: a running fleet of collectors, seen from the process that drives it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cormorant_worker.weights import PolicyVersion

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of a published version."""

    version: PolicyVersion
    applied: tuple[str, ...]
    """Workers that act with this version or a newer one."""
    waiting: tuple[str, ...]
    """Workers that have it staged for their next batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker as the fleet sees it."""

    name: str
    """`<group>-<index>`."""
    attempt: int
    phase: str
    """importing, building, waiting, stepping, storing, paused."""
    frames: int
    """Frames that this attempt has stepped."""
    version: PolicyVersion
    """The version that acts."""
    pid: int
    env_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStats:
    """The whole fleet at one moment."""

    frames: int
    """Frames accepted by the output: what `totalFrames` counts."""
    stepped_frames: int
    """Frames stepped so far, those of unfinished batches among them: for rates."""
    total_frames: int | None
    episodes: int
    """Episodes ended so far."""
    recent_returns: tuple[float, ...]
    """Returns of the last episodes, 100 at most."""
    recent_lengths: tuple[int, ...]
    version: PolicyVersion
    """The newest published version."""
    dropped: Mapping[str, int]
    """Frames that were stepped and never delivered, by reason: crash, stale, drop_oldest, drain, restore."""
    restarts: int
    """Workers replaced so far."""
    queued_batches: int
    paused: bool
    workers: tuple[WorkerStats, ...]


class Fleet(Protocol):
    """All collectors of one job. Methods may be called from any thread; each wait has a limit."""

    def batches(self, *, copy: bool = False) -> Iterator["TensorDict"]:
        """Batches until `totalFrames` are delivered, or for ever."""
        ...

    def publish(self, weights: "Mapping[str, torch.Tensor]", *, wait_s: float = 0.0) -> Receipt:
        """Hand new weights to every worker; each applies them at its next batch boundary."""
        ...

    def pause(self) -> None:
        """Stop stepping; keep everything."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...

    def state(self) -> bytes:
        """Save the whole fleet at a batch boundary."""
        ...

    def restore(self, state: bytes) -> None:
        """Go on from a `state()`."""
        ...

    def resize(self, workers: int) -> None:
        """Start or retire workers."""
        ...

    def stats(self) -> FleetStats:
        """What is going on."""
        ...

    def close(self) -> None:
        """Finish what is under way and end all workers. May be called twice."""
        ...
