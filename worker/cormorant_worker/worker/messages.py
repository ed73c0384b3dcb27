"""Messages between a fleet and its worker processes. Plain data, pickled over a socket pair.

Two sockets per worker, so that control messages never wait behind data:

    data     Start -> Ready -> Begin -> (Ticket -> Sealed | Reseed)* -> Finish -> Finished   (or Failed, then the end)
    control  (Request -> Reply)*, and Applied whenever new weights come into use; also the Reply to Reseed
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Layout
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.timing import BatchTiming
from cormorant_worker.collect.trajectories import Episodes
from cormorant_worker.inference.address import ServerAddress
from cormorant_worker.normalize import Statistics
from cormorant_worker.spaces import Space
from cormorant_worker.weights.cached import NOTHING_SETTLED, Offer, Settled
from cormorant_worker.weights.staged import WeightSpecs


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Fleet -> worker: the worker's identity and settings."""

    job: CollectorJob
    place: WorkerPlace
    frames_per_batch: int
    overrides: bytes = b""
    """A script's objects for this worker: see `WorkerOverrides`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Worker -> fleet: environments have their first observations."""

    layout: Layout
    observation_space: Space
    action_space: Space
    specs: WeightSpecs
    num_threads: int
    kept_version: int = 0
    """Version of the newest weights that this worker's pod kept from an earlier head; 0: none."""
    kept_settled: Settled = NOTHING_SETTLED
    """Frames that the pod's previous head had counted as settled."""
    statistics: Statistics | None = None
    """Statistics of the initial weights; None unless the manifest normalizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPolicy:
    """Fleet -> inference server: the spaces that the first worker reported; sent before any request."""

    observation_space: Space
    action_space: Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Inference server -> fleet: its address for workers."""

    address: ServerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReady:
    """Inference server -> fleet: the policy is built, weights can be offered."""

    kept_version: int = 0
    """The newest weights that this server's pod kept from an earlier head; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Fleet -> worker: where to store frames, besides the tickets' blocks."""

    dataset_uri: str
    """Empty: no dataset."""
    seal_after_s: float = 10.0
    """Age of a shard at which it is sealed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Fleet -> worker: collect one batch into a block, whose descriptor comes with it."""

    number: int
    block_index: int
    num_frames: int
    version: int
    """Version published when this ticket was issued: no older weights may be used, even if the offer has not arrived
    yet."""
    episodes: tuple[int, ...] = ()
    """For evaluations: positions of the episodes to play, counted in place of frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Worker -> fleet: a ticket's batch is complete."""

    number: int
    num_frames: int
    num_rows: int = 0
    num_ends: int = 0
    min_version: int
    """Oldest policy version of the frames; RANDOM_VERSION only if all frames are random."""
    max_version: int
    """Newest policy version. An asynchronous pool's batch begins with frames of an older version."""
    timing: BatchTiming
    episodes: Episodes = field(default_factory=Episodes)
    """Episodes that ended in this batch."""
    durable_frames: int = 0
    """Frames of this attempt that the dataset has made durable so far."""
    env_restarts: int = 0
    next_trajectory: int = 0
    """Higher than any trajectory id in this batch and in earlier ones."""
    random_frames: int = 0
    agent_steps: int = 0
    """Actions of agents in groups."""
    num_steps: int = 0
    """Evaluations: environment steps in the episodes that `num_frames` counts."""
    moments: Statistics | None = None
    """The batch's moments, which are merged into the job's statistics once it is acknowledged."""

    @property
    def landed_frames(self) -> int:
        """Environment steps in the batch."""
        return self.num_steps or self.num_frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Reseed:
    """Fleet -> worker, data, because the stepping thread builds them: rebuild environments with the seeds of another
    place.
    """

    number: int
    place: WorkerPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Fleet -> worker: close everything and end."""

    saves: bool = False
    """Everything is collected: report the collector's state, for `fleet.state()` after the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Worker -> fleet: my pod is about to end. Send no more tickets, and start another worker in my slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Worker -> fleet: the dataset is closed; nothing more will come."""

    state: bytes = b""
    """The collector's state, if it was requested and could be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Worker -> fleet: the error that ends this process."""

    kind: str
    message: str
    traceback: str
    is_final: bool
    """True when a replacement would fail the same way: the user has to change something."""
    may_pass: bool = False
    """Not final in a fleet that has collected before: environments or devices fail here but work on other machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Worker -> fleet: an event for the log."""

    level: str
    event: str
    fields: dict[str, Any] = field(default_factory=dict)


class PlainCommand(Enum):
    """Commands without values."""

    PAUSE = auto()
    """Stop at the next vector step. The reply comes when nothing steps any more."""
    RESUME = auto()
    STOP = auto()
    """Abandon the current batch and end."""
    SAVE = auto()
    """Reply with the collector's state."""
    READ_CACHED = auto()
    """Reply with the newest weights that this worker's pod kept from an earlier head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Batches of this ticket and of earlier ones end at the next vector step."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Continue from a collector's state, which is the payload."""

    first_trajectory: int = 0
    """Open trajectories get new ids from this one on; 0: they keep their ids."""
    rewinds: bool = True
    """Whether environments are restored as well as counters."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignServers:
    """Use these inference servers from now on; see `WorkerPlace.servers`."""

    servers: tuple[ServerAddress, ...]


Command = PlainCommand | Offer | Seal | Restore | Look | Call | AssignServers


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Fleet -> worker, control: execute a command and reply. A payload (weights, state) may come with it."""

    number: int
    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Worker -> fleet, control: the answer to a request."""

    number: int
    state: bytes = b""
    """The saved state, cached weights, or observation."""
    error: str = ""
    """Empty: done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Worker -> fleet, control: this version is used from the next frame on."""

    version: int
