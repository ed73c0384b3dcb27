"""One worker of a fleet, as the fleet's books know it."""

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.protocol import WorkerStats
from cormorant_worker.fleet.scheduler import Round, Slot
from cormorant_worker.fleet.transport import ConnectionClosed, Payload, WorkerConnection
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion
from cormorant_worker.worker.heartbeat import Phase
from cormorant_worker.worker.messages import Request, Ticket

_LONG_REQUESTS = frozenset({"save", "restore", "kept"})


@dataclass(frozen=True, slots=True)
class TicketOut:
    """A ticket that a worker holds."""

    round: Round
    block_index: int
    num_frames: int


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One filled place. Guarded by the fleet's condition.

    starting -> ready (has said its layout) -> synced (has the current weights: may hold tickets) -> leaving -> finished
    """

    link: WorkerConnection
    started: float
    stream: WorkerPlace
    """The place whose seeds its environments have: that of its start, until it begins anew."""
    stuck: "deque[WorkerHandle]"
    """Where it puts itself when it does not read what it is sent."""
    tickets: dict[int, TicketOut] = field(default_factory=dict)
    is_ready: bool = False
    is_synced: bool = False
    sync_request: int = 0
    """The request whose reply makes it synced, where there are no weights to offer."""
    offer: int = 0
    """The offer of weights that it has not answered; 0: none. It gets no other one before."""
    offered: PolicyVersion = INITIAL_VERSION
    """The version that it was offered last."""
    unanswered: dict[int, str] = field(default_factory=dict)
    """What it was asked for and has not answered, by request."""
    refusal: tuple[PolicyVersion, str] = (INITIAL_VERSION, "")
    """The version that it refused last, and why."""
    kept_version: PolicyVersion = INITIAL_VERSION
    """The newest weights that its pod kept from an earlier head, as long as nobody has fetched them."""
    is_leaving: bool = False
    """Gets no more tickets, and is told to finish when it holds none."""
    was_told_to_finish: bool = False
    has_finished: bool = False
    version: PolicyVersion = INITIAL_VERSION
    """The version that acts."""
    landed_frames: int = 0
    dropped_frames: int = 0
    """Stepped by this attempt, and dropped when it began anew."""
    durable_frames: int = 0
    env_restarts: int = 0
    is_gone: bool = False
    """It has ended, or is being ended: nothing is expected of it any more."""
    last_pulse: tuple[int, Phase] = (-1, Phase.IMPORTING)
    last_progress: float = 0.0
    """In the fleet's time: see `Crew.watch`."""
    booked_frames: int = 0
    """Of `stepped_frames`, what the tally has."""
    booked_ns: tuple[int, ...] = ()
    """Likewise, of the time that it has spent."""

    @property
    def name(self) -> str:
        """`<group>-<index>`."""
        return f"{self.link.place.group}-{self.link.place.index}"

    @property
    def place(self) -> Slot:
        """(group, index)."""
        return self.link.place.group, self.link.place.index

    @property
    def attempt(self) -> int:
        """Which process of its place it is, from 0."""
        return self.link.place.attempt

    @property
    def stepped_frames(self) -> int:
        """Frames that this attempt has stepped."""
        return self.link.frames

    def send(self, message: object) -> None:
        """Send Begin, Reseed or Finish. A worker that is dying hears nothing: its link tells the fleet."""
        with suppress(ConnectionClosed):
            self.link.send(message)
        self._note_unsent()

    def send_ticket(self, ticket: Ticket, memory: SharedMemory | None) -> None:
        """Have a batch collected, unless the worker is dying."""
        with suppress(ConnectionClosed):
            self.link.send_ticket(ticket, memory)
        self._note_unsent()

    def request(self, request: Request, payload: Payload | None = None) -> None:
        """Ask for something, unless the worker is dying."""
        self.unanswered[request.number] = request.action
        with suppress(ConnectionClosed):
            self.link.request(request, payload)
        self._note_unsent()

    def _note_unsent(self) -> None:
        if self.link.unsent():
            self.stuck.append(self)

    def silent_for_s(self, now: float, *, is_paused: bool) -> float:
        """Seconds without a sign of life, while there should be one: it has a ticket and does not stand still on
        purpose, or was asked for something.
        """
        pulse = self.stepped_frames, self.link.phase
        rests = is_paused or (pulse[1] is Phase.WAITING and not self.tickets)
        if pulse != self.last_pulse or (rests and self.is_ready and not self.unanswered):
            self.last_pulse, self.last_progress = pulse, now
        return now - self.last_progress

    def drop_ahead(self) -> int:
        """It has begun anew: what its environments were ahead of its last batch will not be delivered. Returns how many
        frames that are.
        """
        ahead = max(0, self.stepped_frames - self.landed_frames - self.dropped_frames)
        self.dropped_frames += ahead
        return ahead

    @property
    def is_storing(self) -> bool:
        """True while it writes or reads what may be on another machine, or is asked for all that it holds."""
        return self.link.phase is Phase.STORING or not _LONG_REQUESTS.isdisjoint(self.unanswered.values())

    def stats(self, *, is_paused: bool) -> WorkerStats:
        phase = self.link.phase
        is_held = is_paused and phase in (Phase.STEPPING, Phase.WAITING)
        return WorkerStats(
            name=self.name,
            attempt=self.link.place.attempt,
            phase="paused" if is_held else phase.name.lower(),
            frames=self.stepped_frames,
            version=self.version,
            pid=self.link.pid,
            env_restarts=self.env_restarts,
        )


def new_handle(link: WorkerConnection, *, now: float, stuck: "deque[WorkerHandle]") -> WorkerHandle:
    """A place has just been filled, at this moment of the fleet's time."""
    return WorkerHandle(link=link, started=time.monotonic(), stream=link.place, stuck=stuck, last_progress=now)
