"""One worker as its fleet knows it."""

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.bookkeeping.scheduler import Round, Slot
from cormorant_worker.fleet.stats import WorkerStats
from cormorant_worker.fleet.transport import ConnectionClosed, Payload, WorkerConnection
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion
from cormorant_worker.worker.heartbeat import Phase
from cormorant_worker.worker.messages import Ready, Request, Sealed, ServerReady, Ticket

_LONG_REQUESTS = frozenset({"save", "restore", "kept"})


@dataclass(frozen=True, slots=True)
class TicketOut:
    round: Round
    block_index: int
    num_frames: int
    handed_at: float = field(default_factory=time.monotonic)
    episodes: tuple[int, ...] = ()
    """Evaluations: positions of the episodes that it plays."""


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One filled slot. Guarded by the fleet's condition.

    starting -> ready (has told its layout) -> synced (has the current weights: may hold tickets) -> leaving -> finished
    """

    connection: WorkerConnection
    stuck: "deque[WorkerHandle]"
    """Where it puts itself when it does not read what it is sent."""
    stream: WorkerPlace
    """The place whose seeds its environments have: that of its start, until it is reseeded."""
    last_progress: float
    """In the fleet's time: see `HangDetector`."""
    started: float = field(default_factory=time.monotonic)
    tickets: dict[int, TicketOut] = field(default_factory=dict)
    is_ready: bool = False
    is_synced: bool = False
    is_leaving: bool = False
    """Gets no more tickets, and is told to finish when it holds none."""
    is_gone: bool = False
    """It has ended, or is being ended: nothing is expected of it any more."""
    has_finished: bool = False
    is_misplaced: bool = False
    """No worker can run in its pod, which ends and has a successor: not a failure of the slot."""
    sync_request: int = 0
    """The request whose reply makes it synced, where there are no weights to offer."""
    offer: int = 0
    """The offer of weights that it has not answered; 0: none. It gets no other one before."""
    offered: PolicyVersion = INITIAL_VERSION
    """The version that it was offered last."""
    refusal: tuple[PolicyVersion, str] = (INITIAL_VERSION, "")
    """The version that it refused last, and why."""
    version: PolicyVersion = INITIAL_VERSION
    cached_version: PolicyVersion = INITIAL_VERSION
    """The newest weights that its pod has of an earlier head, until they are fetched."""
    policy_call: str = ""
    """How it calls the policy, and what it cost to find out; empty: as it is."""
    landed_frames: int = 0
    durable_frames: int = 0
    dropped_frames: int = 0
    """Stepped by this attempt, and dropped when it was reseeded."""
    env_restarts: int = 0
    unanswered: dict[int, str] = field(default_factory=dict)
    """Actions that it was asked for and has not answered, by request."""
    signs: int = 0
    """Times that its heartbeat had changed when it was read."""
    longest_silence_s: float = 0.0
    """Between two of them, since it was ready."""
    _last_heartbeat: tuple[int, Phase, tuple[int, ...]] = (-1, Phase.IMPORTING, ())
    _counted_frames: int = 0
    _counted_ns: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """`<group>-<index>`."""
        return f"{self.connection.place.group}-{self.connection.place.index}"

    @property
    def slot(self) -> Slot:
        return self.connection.place.group, self.connection.place.index

    @property
    def is_server(self) -> bool:
        """It acts for the others' environments, and holds no tickets."""
        return self.connection.place.is_server

    @property
    def takes_weights(self) -> bool:
        """A policy acts in it."""
        return self.is_server or not self.connection.place.servers

    @property
    def group(self) -> str:
        return self.connection.place.group

    @property
    def attempt(self) -> int:
        """Which process of its slot it is, from 0."""
        return self.connection.place.attempt

    @property
    def stepped_frames(self) -> int:
        return 0 if self.is_server else self.connection.frames

    # -- talking -----------------------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        """Send Begin, Reseed or Finish. A worker that is dying hears nothing: its connection tells the fleet."""
        with suppress(ConnectionClosed):
            self.connection.send(message)
        self._note_unsent()

    def send_ticket(self, ticket: Ticket, out: TicketOut, memory: SharedMemory | None) -> None:
        """Have a batch collected, unless the worker is dying."""
        self.tickets[ticket.number] = out
        with suppress(ConnectionClosed):
            self.connection.send_ticket(ticket, memory)
        self._note_unsent()

    def request(self, request: Request, payload: Payload | None = None) -> None:
        """Ask for something, unless the worker is dying."""
        self.unanswered[request.number] = request.action
        with suppress(ConnectionClosed):
            self.connection.request(request, payload)
        self._note_unsent()

    def _note_unsent(self) -> None:
        if self.connection.unsent():
            self.stuck.append(self)

    # -- what it has told --------------------------------------------------------------------------------------

    def ready(self, ready: Ready | ServerReady, *, now: float) -> None:
        """It stands at its first observation, or has built the policy that it serves. From here on it is held to the
        hang limit, which its start may exceed.
        """
        self.is_ready = True
        self.cached_version = PolicyVersion(ready.kept_version)
        self.policy_call = ready.policy_call
        self.last_progress = now

    def landed(self, sealed: Sealed) -> None:
        self.landed_frames += sealed.landed_frames
        self.durable_frames = sealed.durable_frames
        self.env_restarts = sealed.env_restarts

    def drop_ahead(self) -> int:
        """It was reseeded: what its environments were ahead of its last batch will not be delivered. Returns how many
        frames that are.
        """
        ahead = max(0, self.stepped_frames - self.landed_frames - self.dropped_frames)
        self.dropped_frames += ahead
        return ahead

    def take_progress(self) -> tuple[int, tuple[int, ...]]:
        """Frames, and nanoseconds by activity (empty: none), since the last call."""
        frames, spent = self.stepped_frames, self.connection.spent_ns
        new_ns: tuple[int, ...] = ()
        if spent != self._counted_ns:
            before = self._counted_ns or (0,) * len(spent)
            new_ns = tuple(now - then for now, then in zip(spent, before, strict=True))
        new_frames = frames - self._counted_frames
        self._counted_frames, self._counted_ns = frames, spent
        return new_frames, new_ns

    def silent_for_s(self, now: float, *, is_paused: bool) -> float:
        """Seconds without a sign of life, while there should be one: it has a ticket and is not paused, or was asked
        for something.
        """
        # A server counts its turns in place of frames, and turns though it has nothing to do. Who waits for a server
        # looks up twice a second, which ends a stretch of its time.
        phase = self.connection.phase
        heartbeat = self.connection.frames, phase, self.connection.spent_ns if phase is Phase.ASKING else ()
        rests = is_paused or (phase is Phase.WAITING and not self.tickets)
        rests = rests and not self.is_server
        if self.is_ready and heartbeat != self._last_heartbeat:
            self.signs += 1
            self.longest_silence_s = max(self.longest_silence_s, now - self.last_progress)
        if heartbeat != self._last_heartbeat or (rests and self.is_ready and not self.unanswered):
            self._last_heartbeat, self.last_progress = heartbeat, now
        return now - self.last_progress

    @property
    def is_storing(self) -> bool:
        """True while it writes or reads what may be on another machine, or is asked for all that it holds."""
        return self.connection.phase is Phase.STORING or not _LONG_REQUESTS.isdisjoint(self.unanswered.values())

    def stats(self, *, is_paused: bool) -> WorkerStats:
        phase = self.connection.phase
        is_held = is_paused and phase in (Phase.STEPPING, Phase.WAITING)
        return WorkerStats(
            name=self.name,
            attempt=self.attempt,
            phase="paused" if is_held else phase.name.lower(),
            frames=self.stepped_frames,
            version=self.version,
            pid=self.connection.pid,
            env_restarts=self.env_restarts,
            device=self.stream.device,
        )
