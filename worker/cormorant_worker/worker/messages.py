"""What a fleet and its worker processes say to each other. Plain data, pickled over a socket pair made for them.

Two sockets a worker, so that control never waits behind data:

    data     Start -> Ready -> Begin -> (Ticket -> Sealed | Reseed)* -> Finish -> Finished   (or Failed, then the end)
    control  (Request -> Reply)*, and Applied whenever new weights begin to act; the Reply to Reseed, too
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Layout
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.timing import BatchTiming
from cormorant_worker.inference.address import ServerAddress
from cormorant_worker.normalize.moments import Statistics
from cormorant_worker.spaces import Space
from cormorant_worker.weights.cached import NOTHING_SETTLED, Settled
from cormorant_worker.weights.staged import WeightSpecs


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Fleet -> worker: who you are."""

    job: CollectorJob
    place: WorkerPlace
    frames_per_batch: int
    overrides: bytes = b""
    """What the script made for this worker: see `WorkerOverrides`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Worker -> fleet: environments stand at their first observation."""

    layout: Layout
    observation_space: Space
    action_space: Space
    specs: WeightSpecs
    num_threads: int
    kept_version: int = 0
    """The newest weights that this worker's pod kept from an earlier head; 0: none."""
    kept_settled: Settled = NOTHING_SETTLED
    """What the last head that this worker's pod had counted as settled."""
    statistics: Statistics | None = None
    """What its initial weights act with; None where the manifest normalizes nothing."""
    policy_call: str = ""
    """See `ServedPolicy.call`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPolicy:
    """Fleet -> inference server: the spaces that the first worker reported; sent before any request."""

    observation_space: Space
    action_space: Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Inference server -> fleet: where workers find it."""

    address: ServerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReady:
    """Inference server -> fleet: the policy is built, weights can be offered."""

    kept_version: int = 0
    """The newest weights that this server's pod kept from an earlier head; 0: none."""
    policy_call: str = ""
    """See `ServedPolicy.call`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Fleet -> worker: where your frames go, beside the tickets' blocks."""

    dataset_uri: str
    """Empty: no dataset."""
    seal_after_s: float = 10.0
    """Age of a shard at which it is sealed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Fleet -> worker: collect one batch into a block. The descriptor of a block that is new to the worker follows."""

    number: int
    block_index: int
    block_is_new: bool
    num_frames: int
    version: int
    """Published when this ticket was handed out: no older weights may act, even if the offer is still on its way."""
    episodes: tuple[int, ...] = ()
    """Evaluations: positions of the episodes to play; they are counted in place of frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Worker -> fleet: a ticket's batch is complete."""

    number: int
    num_frames: int
    num_rows: int = 0
    num_ends: int = 0
    min_version: int
    """The oldest policy version that acted; RANDOM_VERSION frames do not count unless there are no others."""
    max_version: int
    """The newest. An asynchronous pool's batch begins with frames that an older version acted in."""
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    num_terminated: int
    """Episodes that their environments ended; the others were truncated."""
    timing: BatchTiming
    durable_frames: int = 0
    """Frames of this attempt that the dataset has made durable so far."""
    env_restarts: int = 0
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """What the manifest reports of the same episodes, by name. NaN where a value is missing."""
    tasks: tuple[str, ...] = ()
    """Variants that the same episodes played; empty without variants."""
    next_trajectory: int = 0
    """Higher than any trajectory id in this batch and in earlier ones."""
    random_frames: int = 0
    num_steps: int = 0
    """Evaluations: environment steps in the episodes that `num_frames` counts."""
    moments: Statistics | None = None
    """What the batch adds to the job's statistics, once it is acknowledged."""

    @property
    def landed_frames(self) -> int:
        """Environment steps in the batch."""
        return self.num_steps or self.num_frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Reseed:
    """Fleet -> worker: build environments and streams again, with the seeds of another place. On the data
    socket, because the thread that steps them builds them.
    """

    number: int
    """Number of the reply."""
    place: WorkerPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Fleet -> worker: close everything and end."""

    saves: bool = False
    """Everything is collected: tell what the collector's state is, for `fleet.state()` after the end."""
    settled: Settled = NOTHING_SETTLED
    """What this worker's pod tells the next head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Worker -> fleet: what I run on is about to end. Send no more tickets, and start another worker in my slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Worker -> fleet: the dataset is closed; nothing more will come."""

    state: bytes = b""
    """The collector's, if it was asked for and could be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Worker -> fleet: why this process ends."""

    kind: str
    """The error's class."""
    message: str
    traceback: str
    is_final: bool
    """True when a replacement would fail the same way: the user has to change something."""
    may_pass: bool = False
    """It is not final in a fleet that has collected before: no environment steps here, or no device is found, and
    elsewhere they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Worker -> fleet: an event for the log."""

    level: str
    event: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Take published weights, which are the payload."""

    version: int
    default_model: str = ""
    """Model of the tensors whose names carry none."""
    models: tuple[str, ...] = ()
    """Models to apply; the payload's others are out of date."""
    statistics: Statistics | None = None
    """Statistics that the version acts with."""


@dataclass(frozen=True, slots=True)
class PauseStepping:
    """Stop at the next vector step. The reply comes when nothing steps any more."""


@dataclass(frozen=True, slots=True)
class ResumeStepping:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Batches of this ticket and of earlier ones end at the next vector step."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Give the batch under way up, and end."""


@dataclass(frozen=True, slots=True)
class Save:
    """Reply with the collector's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Go on from a collector's state, which is the payload."""

    first_trajectory: int = 0
    """Open trajectories get new ids from this one on; 0: they keep their ids."""
    rewinds: bool = True
    """Environments are put back as well as counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Reply with the bytes of one environment's current observation: for a preview."""

    column: int
    """Column of the environment, of B."""
    leaf: int
    """Index of the leaf of its observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Reply with what a function returns, called as `WorkerFleet.call` says; both are pickled."""

    function: bytes


@dataclass(frozen=True, slots=True)
class ReadCached:
    """Reply with the newest weights that this worker's pod has of an earlier head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignServers:
    """These inference servers act for you from now on; see `WorkerPlace.servers`."""

    servers: tuple[ServerAddress, ...]


Command = (
    Offer | PauseStepping | ResumeStepping | Seal | Stop | Save | Restore | Look | Call | ReadCached | AssignServers
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Fleet -> worker, control: carry a command out and reply."""

    number: int
    command: Command
    size_bytes: int = 0
    """Bytes of the payload (weights, state) that comes with it; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Worker -> fleet, control: the answer to a request."""

    number: int
    state: bytes = b""
    """What was saved, cached, or looked at."""
    error: str = ""
    """Empty: done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Worker -> fleet, control: this version acts from the next frame on."""

    version: int
