"""What every engine offers: a running fleet of collectors, seen from the process that drives it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Layout
from cormorant_worker.fleet.events import Listener
from cormorant_worker.fleet.loan import Loan
from cormorant_worker.spaces import Space
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.staged import PolicyVersion, Weights, WeightSpecs

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from cormorant_worker.fleet.eyes import Eyes
    from cormorant_worker.fleet.inheritance import Inheritance


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of a published version."""

    version: PolicyVersion
    applied: tuple[str, ...]
    """Workers that act with this version or a newer one."""
    waiting: tuple[str, ...]
    """Workers that have it staged for their next batch."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why workers that are in neither of the others refused it, by name."""


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
    """0 while it has none: a Ray actor that is not placed."""
    env_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """One worker group, with those of its workers that are gone."""

    desired: int
    """Places that are to be filled."""
    ready: int
    """Workers that may collect."""
    starting: int
    stepped_frames: int
    """So far."""
    spent_s: Mapping[str, float]
    """Seconds of all workers by activity: `cormorant_contract.metrics.labels.ACTIVITIES`."""
    restarts: Mapping[Literal["crash", "hang", "error"], int]
    """Workers replaced so far, by reason."""
    env_restarts: int
    min_version: PolicyVersion
    """The oldest that acts in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStats:
    """The whole fleet at one moment."""

    frames: int
    """Frames accepted by the output: what `totalFrames` counts."""
    settled_frames: int
    """Those of them that nobody can lose any more: consumers are done with them, or they were dropped as the oldest, or
    are in a dataset."""
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
    """Frames that were stepped and never delivered, by reason: crash, stale, drop_oldest, drain, restore, seed."""
    restarts: int
    """Workers replaced so far."""
    queued_batches: int
    paused: bool
    workers: tuple[WorkerStats, ...]
    groups: Mapping[str, GroupStats]
    queue_capacity: int
    """Batches; 0: no queue."""
    queue_waits_s: Mapping[str, float]
    """Seconds in which somebody waited: producer for room, consumer for a batch."""
    undurable_frames: int
    """In sealed batches that the dataset has not made durable yet; 0 without one."""


class Fleet(Protocol):
    """All collectors of one job. Methods may be called from any thread; each wait has a limit."""

    job: CollectorJob

    @property
    def specs(self) -> WeightSpecs:
        """What published weights must look like."""
        ...

    @property
    def spaces(self) -> tuple[Space, Space]:
        """Observation and action space of one environment."""
        ...

    @property
    def layout(self) -> Layout:
        """What a full batch of one worker holds."""
        ...

    @property
    def eyes(self) -> "Eyes":
        """What single environments show now."""
        ...

    @property
    def inheritance(self) -> "Inheritance":
        """Weights that workers' pods kept from an earlier head."""
        ...

    @property
    def found_frames(self) -> int:
        """Frames that counted before this fleet collected any."""
        ...

    @property
    def is_done(self) -> bool:
        """True when every frame that will be is accepted."""
        ...

    def borrow(self, *, timeout_s: float | None = None) -> Loan | None:
        """Borrow the next round; None when there will be none."""
        ...

    def batches(self, *, copy: bool = False) -> Iterator["TensorDict"]:
        """Batches until `totalFrames` are delivered, or for ever."""
        ...

    def publish(
        self,
        weights: "Mapping[str, torch.Tensor] | Weights | WeightsBlob",
        *,
        version: int | None = None,
        wait_s: float = 0.0,
        workers: Sequence[str] = (),
    ) -> Receipt:
        """Hand new weights to every worker, or to some; each applies them at its next batch boundary."""
        ...

    def receipt(self, version: int) -> Receipt:
        """Who acts with a published version by now."""
        ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have a function told what happens, by the fleet's thread. Returns what ends it."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def state(self) -> bytes:
        """Save the whole fleet at a batch boundary."""
        ...

    def restore(self, state: bytes) -> None:
        """Go on from a `state()`."""
        ...

    def seed(self, seed: int) -> tuple[str, ...]:
        """Have every worker begin anew from a seed, at its next batch boundary."""
        ...

    def resize(self, workers: int | Mapping[str, int | Collection[int]], *, wait: bool = True) -> None:
        """Start or retire workers, in all or by group."""
        ...

    def retire(self, name: str) -> None:
        """Let one worker finish and end; nobody takes its place until its group's size is raised."""
        ...

    def drain(self) -> None:
        """Finish what is under way, and start nothing more."""
        ...

    def stats(self, *, workers: bool = True) -> FleetStats:
        """What is going on; `workers=False` leaves `FleetStats.workers` empty and costs the same for any number."""
        ...

    @property
    def version(self) -> PolicyVersion:
        """The newest published version. Costs nothing, and never waits."""
        ...

    @property
    def silent_s(self) -> float:
        """Seconds since the fleet's own thread turned last. Never waits."""
        ...

    def close(self) -> None:
        """Finish what is under way and end all workers. May be called twice."""
        ...

    def kill(self) -> None:
        """End all workers at once. May be called twice."""
        ...
