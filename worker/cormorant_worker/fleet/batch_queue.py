"""From sealed batches to the consumer: complete rounds, the bounded queue, what was dropped. Not thread-safe.

sealed -> (round complete) -> backlog -> accepted into the queue -> lent to a consumer -> slots given back
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from cormorant_worker.fleet.events import Events
from cormorant_worker.fleet.scheduler import Round, Scheduler, Slot
from cormorant_worker.fleet.transport import BlockPool
from cormorant_worker.weights.staged import RANDOM_VERSION
from cormorant_worker.worker.messages import Sealed


@dataclass(frozen=True, slots=True)
class RoundShare:
    """One worker's share of a round."""

    message: Sealed
    block_index: int
    """Where it lies in the block pool."""
    attempt: int = 0
    """Which process of its place made it."""


class Delivery:
    """A complete round, on its way to the consumer. Added up once: others ask at every turn."""

    __slots__ = ("max_version", "min_version", "num_frames", "parts", "round")

    def __init__(self, found: Round, parts: tuple[tuple[Slot, RoundShare], ...]) -> None:
        self.round = found
        self.parts = parts
        """In the order of the workers' places."""
        self.num_frames = sum(part.message.num_frames for _, part in parts)
        acted = [part.message.min_version for _, part in parts if part.message.min_version != RANDOM_VERSION]
        self.min_version = min(acted, default=RANDOM_VERSION)
        """The oldest policy version that acted in it; RANDOM_VERSION where none did."""
        self.max_version = max(part.message.max_version for _, part in parts)
        """The newest."""


class BatchQueue:
    """Rounds that are complete or on their way, and the frames that were dropped. Guarded by the fleet's condition."""

    def __init__(
        self,
        schedule: Scheduler,
        *,
        capacity: int,
        drops_oldest: bool,
        has_dataset: bool = False,
        events: Events | None = None,
    ) -> None:
        """Make an empty queue.

        Args:
            schedule: whose rounds these are.
            capacity: rounds that the queue and the consumers hold at most; 0 = no queue, the dataset takes all.
            drops_oldest: a full queue drops its oldest round instead of making workers wait.
            has_dataset: frames are durable, and count, whatever becomes of them in the queue.
            events: hears of rounds that were accepted and of frames that were dropped.
        """
        self.blocks: BlockPool | None = None
        """Set when the first worker has told the layout."""
        self.has_lent = False
        """A consumer has taken a round."""
        self.dropped: dict[str, int] = {}
        """Frames that were stepped and never delivered, by reason."""
        self._schedule = schedule
        self._capacity = capacity
        self._drops_oldest = drops_oldest
        self._has_dataset = has_dataset
        self._landed: dict[int, dict[Slot, RoundShare]] = {}
        self._backlog: list[tuple[int, Delivery]] = []
        """A heap by round: a short last round may lack a straggler that an earlier one still waits for."""
        self._queue: deque[Delivery] = deque()
        self._lent: dict[int, Delivery] = {}
        """Rounds whose memory is with consumers, by number."""
        self._at_work: dict[int, int] = {}
        """Frames of the rounds that consumers are not done with, by number: they may still publish for them."""
        self._events = events or Events()

    # -- in ----------------------------------------------------------------------------------------------------

    def land(self, landed: Round, worker: Slot, part: RoundShare) -> list[Slot]:
        """A worker sealed its part of a round. Returns those who are to seal what they have of it now."""
        self._landed.setdefault(landed.number, {})[worker] = part
        found = self._schedule.landed(landed.number, worker, part.message.num_frames)
        late = [] if found.is_complete else self._schedule.preempt(found)
        if found.is_complete:
            self.complete([found])
        return late

    def complete(self, rounds: Iterable[Round]) -> None:
        """These rounds wait for nobody any more."""
        for found in rounds:
            parts = tuple(sorted(self._landed.pop(found.number).items()))
            heappush(self._backlog, (found.number, Delivery(found, parts)))

    def accept(self) -> None:
        """Move complete rounds into the queue as far as it has room; their frames count from now on."""
        while self._backlog and not self._schedule.waits_for_earlier(self._backlog[0][1].round):
            if self._capacity and not self._has_room and not self._make_room():
                return
            _, delivery = heappop(self._backlog)
            self._schedule.accepted(delivery.round.number)
            self._events.note("accepted", frames=delivery.num_frames, version=delivery.min_version)
            if self._capacity:
                self._queue.append(delivery)
            else:
                self._give_back(delivery)

    # -- out ---------------------------------------------------------------------------------------------------

    def take(self, *, min_version: int | None) -> Delivery | None:
        """The oldest round in the queue, lent until `release`; None when the queue is empty.

        Rounds in which an older version than `min_version` acted are dropped, counted as stale, and collected again
        unless a dataset has them.
        """
        while self._queue:
            delivery = self._queue.popleft()
            if min_version is not None and 0 <= delivery.min_version < min_version:
                self._drop(delivery, "stale")
                if not self._has_dataset:
                    self._schedule.take_back(delivery.num_frames)
                continue
            self.has_lent = True
            self._lent[delivery.round.number] = delivery
            self._at_work[delivery.round.number] = delivery.num_frames
            return delivery
        return None

    def copied(self, number: int) -> None:
        """A consumer has copied a round and still works on it. May be called twice."""
        if (delivery := self._lent.pop(number, None)) is not None:
            self._give_back(delivery)

    def release(self, number: int) -> None:
        """A consumer is done with a round. May be called twice."""
        self.copied(number)
        self._at_work.pop(number, None)

    def discard(self, reason: str) -> None:
        """Drop every round that no consumer holds. No ticket may be out."""
        for delivery in (*self._queue, *(delivery for _, delivery in self._backlog)):
            self._drop(delivery, reason)
        for landed, parts in self._landed.items():
            self._drop(Delivery(Round(number=landed, frames={}), tuple(parts.items())), reason)
        self._queue.clear()
        self._backlog.clear()
        self._landed.clear()
        self._schedule.forget_open()

    # -- room --------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Rounds that are complete and not taken."""
        return len(self._queue) + len(self._backlog)

    @property
    def unsettled_frames(self) -> int:
        """Frames that count and would be lost with this process: in the queue, or with a consumer."""
        if self._has_dataset:
            return 0
        return sum(delivery.num_frames for delivery in self._queue) + sum(self._at_work.values())

    @property
    def is_drained(self) -> bool:
        """True when every complete round has been accepted."""
        return not self._backlog

    @property
    def ahead_of_consumer(self) -> int:
        """Rounds that consumers see before one that begins now: the queue, and what they still work on."""
        return len(self._queue) + len(self._at_work)

    @property
    def room(self) -> int:
        """Slots that can be lent now, those that dropping would free among them."""
        if self.blocks is None:
            return 0
        droppable = sum(len(delivery.parts) for delivery in self._queue) if self._drops_oldest else 0
        return self.blocks.room + droppable

    @property
    def _has_room(self) -> bool:
        # A consumer at work does not make workers wait where the oldest may be dropped.
        lent = 0 if self._drops_oldest else len(self._lent)
        return len(self._queue) + lent < self._capacity

    def free_a_block(self) -> None:
        """Drop rounds, if need be, until a slot can be lent."""
        assert self.blocks is not None
        while not self.blocks.room and self._make_room():
            pass  # each turn drops one round

    def count_dropped(self, reason: str, num_frames: int) -> None:
        """Frames were stepped and will not be delivered."""
        if num_frames > 0:
            self.dropped[reason] = self.dropped.get(reason, 0) + num_frames
            self._events.note("dropped", frames=num_frames, reason=reason)

    def _make_room(self) -> bool:
        if not self._drops_oldest or not self._queue:
            return False
        self._drop(self._queue.popleft(), "drop_oldest")
        return True

    def _drop(self, delivery: Delivery, reason: str) -> None:
        self._give_back(delivery)
        self.count_dropped(reason, delivery.num_frames)

    def _give_back(self, delivery: Delivery) -> None:
        assert self.blocks is not None
        for _, part in delivery.parts:
            self.blocks.give_back(part.block_index)
