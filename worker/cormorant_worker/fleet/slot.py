"""A slot, the worker in it, and the states that a slot goes through.

RETIRED <-> VACANT -> STARTING -> BUILDING -> READY -> WORKING -> LEAVING -> FINISHING -> GONE -> VACANT, or RETIRED
               ^         |            |         |         |                     ^          ^
               |         |            +---------+---------+---- any of them ----+----------+
               +-- it could not start

Only `Slots.move` writes a slot's state, and refuses transitions that are not in TRANSITIONS. Their side effects are
methods of `SlotLife` (`turn/life.py`), one per entered state.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.scheduler import Round, SlotKey
from cormorant_worker.fleet.transport import Payload, WorkerConnection
from cormorant_worker.inference.address import ServerAddress
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion
from cormorant_worker.wire import SharedMemory
from cormorant_worker.worker.heartbeat import Phase
from cormorant_worker.worker.messages import Command, Reply, Request, Reseed, Ticket


class SlotState(Enum):
    RETIRED = auto()
    """No worker is in it, and none is wanted."""
    VACANT = auto()
    """A worker is wanted."""
    STARTING = auto()
    """The engine was asked for a worker."""
    BUILDING = auto()
    """Its worker imports modules and builds environments and policy."""
    READY = auto()
    """Its worker has reported its layout, opens its dataset and applies the current weights."""
    WORKING = auto()
    """It may hold tickets."""
    LEAVING = auto()
    """Its worker gets no more tickets, and is told to finish when it holds none."""
    FINISHING = auto()
    """It was told to finish."""
    GONE = auto()
    """Its worker has ended or is being ended, but its frames are not accounted for yet."""


TRANSITIONS = {
    SlotState.RETIRED: {SlotState.VACANT},
    SlotState.VACANT: {SlotState.STARTING, SlotState.RETIRED},
    SlotState.STARTING: {SlotState.BUILDING, SlotState.VACANT, SlotState.RETIRED},
    SlotState.BUILDING: {SlotState.READY, SlotState.LEAVING, SlotState.FINISHING, SlotState.GONE},
    SlotState.READY: {SlotState.WORKING, SlotState.LEAVING, SlotState.FINISHING, SlotState.GONE},
    SlotState.WORKING: {SlotState.LEAVING, SlotState.FINISHING, SlotState.GONE},
    SlotState.LEAVING: {SlotState.FINISHING, SlotState.GONE},
    SlotState.FINISHING: {SlotState.GONE},
    SlotState.GONE: {SlotState.VACANT, SlotState.RETIRED},
}
LIVING = (SlotState.BUILDING, SlotState.READY, SlotState.WORKING, SlotState.LEAVING, SlotState.FINISHING)
"""States in which the fleet listens to the worker."""
SERVING = (SlotState.READY, SlotState.WORKING)
"""States in which the worker gets weights."""


@dataclass(slots=True, eq=False)
class Slot:
    """A worker's place in the fleet, which outlives its workers and being retired. Guarded by the fleet's condition."""

    key: SlotKey
    is_server: bool = False
    """Its workers serve policy calls for the other groups' environments and hold no tickets."""
    written: int = 0
    """Frames received from it, including those in the dataset. Never decreases."""
    is_wanted: bool = False
    """Written by `Slots.resize`."""
    state: SlotState = SlotState.RETIRED
    """Written by `Slots.move`."""
    worker: "WorkerHandle | None" = None
    """From BUILDING to GONE."""
    failures: int = 0
    """In a row."""
    not_before: float = 0.0
    """Earliest start of its next worker, by time.monotonic()."""
    final_state: bytes | None = None
    """Collector's state of the last worker, once it has finished; empty: it could not be saved."""
    # What was used up, so that nothing is handed out twice: see `Lineage`.
    attempt: int = -1
    """Last random stream that it began, in this fleet or in one whose state was restored."""
    next_trajectory: int = 0
    """Higher than all its trajectory ids."""
    warmup_frames: int | None = None
    """Random frames still to collect; None until its first worker starts."""
    warmup_share: int = 0
    """Random frames that it owed at first."""
    # Inference: written by `Slots`.
    address: ServerAddress | None = None
    """Address of its server; None: not reported yet."""
    servers: tuple[ServerAddress, ...] = ()
    """Servers last sent to its worker."""

    @property
    def name(self) -> str:
        """`<group>-<index>`."""
        return f"{self.key[0]}-{self.key[1]}"

    @property
    def group(self) -> str:
        return self.key[0]


@dataclass(frozen=True, slots=True)
class TicketOut:
    ticket: Ticket
    round: Round
    handed_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class Question:
    """A request to a worker besides tickets. A dying worker does not reply; it is gone then."""

    handle: "WorkerHandle"
    command: Command | None
    """None: to reseed."""
    reply: Reply | None = None


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
    pid: int
    """0 while it has none: a Ray actor that is not placed."""
    env_restarts: int
    device: str = "cpu"


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker: the n-th attempt to fill a slot. Guarded by the fleet's condition."""

    slot: Slot
    connection: WorkerConnection
    stuck: "set[WorkerHandle]"
    """Set to which it adds itself while it does not read its messages."""
    last_progress: float
    """Time of its last progress; see `HangDetector`."""
    stream: WorkerPlace = field(init=False)
    """Place whose seeds its environments use: that of its start, until it is reseeded."""
    started: float = field(default_factory=time.monotonic)
    tickets: dict[int, TicketOut] = field(default_factory=dict)
    reached: SlotState = SlotState.BUILDING
    """Last of the states BUILDING, READY, WORKING that it reached. Written by `Slots.move`."""
    offer: Question | None = None
    """Unanswered offer of weights, or the first request sent in place of one. It gets no other offer before it
    answers."""
    offered: PolicyVersion = INITIAL_VERSION
    accepted: PolicyVersion = INITIAL_VERSION
    """Version that it last accepted: it will apply it, if it has not."""
    refusal: tuple[PolicyVersion, str] = (INITIAL_VERSION, "")
    """Version that it last refused, and the reason."""
    version: PolicyVersion = INITIAL_VERSION
    cached_version: PolicyVersion = INITIAL_VERSION
    """Version of the newest weights that its pod kept from an earlier head, until they are fetched."""
    landed_frames: int = 0
    durable_frames: int = 0
    pod_ends: bool = False
    """Its pod is about to end."""
    dropped_frames: int = 0
    """Frames stepped by this attempt and dropped when it was reseeded."""
    env_restarts: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Of its tickets and requests."""
    unanswered: dict[int, Question] = field(default_factory=dict)
    """Unanswered requests by number."""
    signs: int = 0
    """Number of reads at which its heartbeat had changed."""
    longest_silence_s: float = 0.0
    """Longest time between two changes of its heartbeat, since it was ready."""
    last_heartbeat: tuple[int, Phase, tuple[int, ...]] = (-1, Phase.IMPORTING, ())
    """See `HangDetector`."""
    counted_frames: int = 0
    """Part of `stepped_frames` that is in the fleet's counters; likewise `counted_ns` of its times."""
    counted_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.stream = self.connection.place

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def is_gone(self) -> bool:
        """It has ended or is being ended; the slot may already have another worker."""
        return self.slot.worker is not self or self.slot.state is SlotState.GONE

    @property
    def is_ready(self) -> bool:
        """It has reported its layout; it may be leaving by now."""
        return self.reached is not SlotState.BUILDING

    @property
    def has_worked(self) -> bool:
        """It was able to hold tickets; it may be leaving by now."""
        return self.reached is SlotState.WORKING

    @property
    def gets_weights(self) -> bool:
        """It calls a policy, and is not leaving."""
        is_serving = self.slot.worker is self and self.slot.state in SERVING
        return is_serving and self._acts

    @property
    def may_be_offered(self) -> bool:
        """It gets weights, or is leaving with tickets that require certain versions."""
        holds = self.slot.worker is self and self.slot.state is SlotState.LEAVING and bool(self.tickets)
        return self.gets_weights or (holds and self._acts)

    @property
    def _acts(self) -> bool:
        return self.slot.is_server or not self.connection.place.servers

    @property
    def stepped_frames(self) -> int:
        return 0 if self.slot.is_server else self.connection.frames

    # -- talking -----------------------------------------------------------------------------------------------

    def send(self, message: object, memory: SharedMemory | None = None) -> None:
        """Send a message that is not a request, unless the worker is dying. `memory`: that of a ticket's block."""
        self.connection.send(message, memory)
        self._flush()

    def _flush(self) -> None:
        if self.connection.flush() and not self.is_gone:
            self.stuck.add(self)

    def ask(self, command: Command, payload: Payload | None = None) -> Question:
        request = Request(number=next(self.numbers), command=command)
        self.unanswered[request.number] = question = Question(self, command)
        self.connection.ask(request, payload)
        self._flush()
        return question

    def reseed(self, stream: WorkerPlace) -> Question:
        """Rebuild its environments with the seeds of a place."""
        number = next(self.numbers)
        self.unanswered[number] = question = Question(self, None)
        self.stream = stream
        self.send(Reseed(number=number, place=stream))
        return question

    def note_reply(self, reply: Reply) -> Question:
        question = self.unanswered.pop(reply.number)
        question.reply = reply
        return question

    # -- what it has told --------------------------------------------------------------------------------------

    def has_refused(self, version: PolicyVersion) -> bool:
        """True if it refused this version or a newer one, and has accepted neither."""
        return self.accepted < version <= self.refusal[0]

    def drop_ahead(self) -> int:
        """After a reseed, drop the surplus frames of its environments. Returns their number."""
        ahead = max(0, self.stepped_frames - self.landed_frames - self.dropped_frames)
        self.dropped_frames += ahead
        return ahead

    def stats(self, *, is_paused: bool) -> WorkerStats:
        phase = self.connection.phase
        is_held = is_paused and phase in (Phase.STEPPING, Phase.WAITING)
        return WorkerStats(
            name=self.name,
            attempt=self.connection.place.attempt,
            phase="paused" if is_held else phase.name.lower(),
            frames=self.stepped_frames,
            version=self.version,
            pid=self.connection.pid,
            env_restarts=self.env_restarts,
            device=self.stream.device,
        )
