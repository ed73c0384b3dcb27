"""Decides which worker collects how many frames next: pure bookkeeping, without processes, clocks or memory.

A *round* is one delivery to the consumer: one ticket in async mode, one ticket of every worker in sync mode.

    open (tickets out) -> complete (all landed) -> accepted (in the queue: its frames count) -> taken
         |                     |                        |
         +-- crash: the lost tickets' frames are        +-- dropped: drop_oldest (they count), too stale (they
             collected again                                 do not, and are collected again)
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from typing import Any, Literal

Mode = Literal["sync", "async"]
SlotKey = tuple[str, int]
"""Names a slot: (group, index)."""

_ROUNDING = 1e-9
TICKETS_AHEAD = 2
"""Number of tickets that a worker may hold: the current one and the next, so that it never waits for the fleet."""


@dataclass(slots=True)
class Round:
    """Tickets that are delivered together."""

    number: int
    frames: dict[SlotKey, int]
    """Number of frames requested of each member."""
    pending: set[SlotKey] = field(default_factory=set)
    """Members without a ticket: the round has just been opened, or they have just been lost."""
    landed: dict[SlotKey, Any] = field(default_factory=dict)
    """Members whose batch is complete, each with its batch."""
    is_preempted: bool = False
    """Enough batches have landed: the other workers hand over short batches; workers without frames are skipped."""

    @property
    def is_complete(self) -> bool:
        return len(self.landed) == len(self.frames)


Grant = tuple[Round, SlotKey]
"""A ticket that may be issued now: a number of frames of a slot for a round."""


class Scheduler:
    """Decides which tickets may go out. Owned by the fleet's thread."""

    def __init__(
        self,
        *,
        mode: Mode,
        frames_per_batch: int,
        total_frames: int | None,
        max_staleness: int | None,
        preemptive_threshold: float = 1.0,
    ) -> None:
        self.mode = mode
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.max_staleness = max_staleness
        self.preemptive_threshold = preemptive_threshold
        self.accepted_frames = 0
        """Frames that the output has taken, in this fleet or before it; what `totalFrames` counts. What is lost or too
        stale is subtracted by those who find it, and collected again.
        """
        self.is_draining = False
        """No ticket goes out any more."""
        self.outstanding_frames = 0
        """Frames that are asked for and not accepted yet."""
        self._open: dict[int, Round] = {}
        self._pending: dict[int, Round] = {}
        """Open rounds in which members have no ticket, in order: a worker's frames are delivered in order."""
        self._next_number = 0
        self._last_number: dict[SlotKey, int] = {}
        """The last round that each worker got a ticket of, in async mode."""
        self.held: dict[SlotKey, int] = {}
        """Workers that may collect, and how many tickets each of them holds."""
        self._num_holding: Counter[int] = Counter()
        """How many of them hold so many."""
        self._waiting: tuple[list[tuple[int, SlotKey]], ...] = tuple([] for _ in range(TICKETS_AHEAD))
        """Heaps of workers by the tickets that they hold, those that have waited longest first; with entries of the
        past, which `_next_waiting` drops.
        """

    # -- what there is left ------------------------------------------------------------------------------------

    @property
    def landed_frames(self) -> int:
        """Number of collected frames, including those that the output has not accepted yet."""
        return self.accepted_frames + sum(r.frames[slot] for r in self._open.values() for slot in r.landed)

    @property
    def remaining_frames(self) -> int | None:
        """Number of frames without a ticket yet; None without a limit."""
        if self.total_frames is None:
            return None
        return self.total_frames - self.accepted_frames - self.outstanding_frames

    @property
    def is_done(self) -> bool:
        """True if every frame is accepted and no ticket is out."""
        if self._open:
            return False
        return self.is_draining or (self.total_frames is not None and self.accepted_frames >= self.total_frames)

    def round_up(self, num_envs: int, *, num_workers: int) -> None:
        """Round tickets up to whole steps of `num_envs` environments. Called before any decision."""
        self.frames_per_batch += -self.frames_per_batch % num_envs
        if self.total_frames is not None:
            self.total_frames += -self.total_frames % (num_envs * (num_workers if self.mode == "sync" else 1))

    # -- decisions ---------------------------------------------------------------------------------------------

    def may_collect(self, slot: SlotKey, *, holds: int) -> None:
        """A worker may get tickets and holds so many. Called when either changes; `grants` counts its own."""
        self.may_not_collect(slot)
        self.held[slot] = holds
        self._num_holding[holds] += 1
        if holds < TICKETS_AHEAD and self.mode == "async":
            heappush(self._waiting[holds], (self._last_number.get(slot, -1), slot))

    def may_not_collect(self, slot: SlotKey) -> None:
        held = self.held.pop(slot, None)
        if held is not None:
            self._num_holding[held] -= 1

    def grants(self, *, num_workers: int, ahead_of_consumer: int, room: int, most: int = 1 << 30) -> list[Grant]:
        """Tickets to hand out now, at most `most`. `num_workers`: those wanted, all of which a sync round waits for;
        `ahead_of_consumer`: complete rounds that are not taken, plus the one in use; `room`: free blocks.
        """
        granted: list[Grant] = []
        if self.is_draining:
            return granted
        depth = TICKETS_AHEAD if self.max_staleness is None else 1
        if self.mode == "async":
            # Idle workers first, so that scarce room keeps as many of them busy as possible; those who have waited
            # longest before others, so that a slow consumer gets frames of all of them.
            for holds in range(depth):
                while len(granted) < min(room, most) and self._is_fresh_enough(ahead_of_consumer):
                    remaining = self.remaining_frames
                    count = self.frames_per_batch if remaining is None else min(self.frames_per_batch, remaining)
                    if count <= 0 or (slot := self._next_waiting(holds)) is None:
                        break
                    opened = self._open_round({slot: count})
                    granted.append((opened, slot))
                    self._last_number[slot] = opened.number
                    self.may_collect(slot, holds=holds + 1)
            return granted
        while True:
            # Members without a ticket: the round is new, or the worker that had the ticket is gone.
            for round_ in list(self._pending.values()):
                least = min(room, most) - len(granted)
                if least <= 0:
                    return granted
                for slot in nsmallest(least, (slot for slot in round_.pending if slot in self.held)):
                    round_.pending.discard(slot)
                    self.may_collect(slot, holds=self.held[slot] + 1)
                    granted.append((round_, slot))
                if not round_.pending:
                    del self._pending[round_.number]
            if not (
                len(granted) < most
                and self.held
                and len(self.held) == num_workers
                and not any(self._num_holding[holds] for holds in range(depth, TICKETS_AHEAD + 1))
                and not self._pending
                and room - len(granted) >= len(self.held)
                and self._is_fresh_enough(ahead_of_consumer)
            ):
                return granted
            remaining, share, rest = self.remaining_frames, self.frames_per_batch, 0
            if remaining is not None and remaining < share * len(self.held):
                share, rest = divmod(max(remaining, 0), len(self.held))
            frames = {slot: n for i, slot in enumerate(sorted(self.held)) if (n := share + (i < rest))}
            if not frames:
                return granted
            opened = self._open_round(frames)
            opened.pending.update(frames)
            self._pending[opened.number] = opened

    def _next_waiting(self, depth: int) -> SlotKey | None:
        """The worker with so many tickets that has waited longest."""
        heap = self._waiting[depth]
        while heap:
            number, slot = heap[0]
            if self.held.get(slot) == depth and self._last_number.get(slot, -1) == number:
                return slot
            heappop(heap)
        return None

    def _is_fresh_enough(self, ahead: int) -> bool:
        """A round opened now is consumed after `ahead` + open others; the learner publishes once per round at most."""
        return self.max_staleness is None or ahead + len(self._open) <= self.max_staleness

    def _open_round(self, frames: dict[SlotKey, int]) -> Round:
        opened = Round(number=self._next_number, frames=frames)
        self._next_number += 1
        self._open[opened.number] = opened
        self.outstanding_frames += sum(frames.values())
        return opened

    def _close_round(self, number: int) -> int:
        """A round is not asked for any more. Returns its frames."""
        count = sum(self._open.pop(number).frames.values())
        self._pending.pop(number, None)
        self.outstanding_frames -= count
        return count

    def _excuse(self, round_: Round, slot: SlotKey) -> None:
        """A round goes on without a member that has no ticket."""
        round_.pending.discard(slot)
        self.outstanding_frames -= round_.frames.pop(slot)
        if not round_.pending:
            self._pending.pop(round_.number, None)

    # -- events ------------------------------------------------------------------------------------------------

    def landed(self, round_: Round, slot: SlotKey, num_frames: int, part: object = None) -> None:
        """Record a member's complete batch. Missing frames are collected later."""
        round_.landed[slot] = part
        self.outstanding_frames += num_frames - round_.frames[slot]
        round_.frames[slot] = num_frames

    def preempt(self, round_: Round) -> list[SlotKey]:
        """Members that should hand over short batches, once enough batches of a round have landed."""
        enough = math.ceil(self.preemptive_threshold * len(round_.frames) - _ROUNDING)
        if self.preemptive_threshold >= 1 or round_.is_preempted or len(round_.landed) < enough:
            return []
        round_.is_preempted = True
        for slot in tuple(round_.pending):
            self._excuse(round_, slot)
        return sorted(round_.frames.keys() - round_.landed.keys())

    def lost(self, round_: Round, slot: SlotKey) -> int:
        """A member died with its ticket, which its slot's next worker gets in sync mode. Returns the frames to collect
        again.
        """
        count = round_.frames[slot]
        if self.mode == "sync":
            round_.pending.add(slot)
            self._pending = dict(sorted({**self._pending, round_.number: round_}.items()))
        else:
            self._close_round(round_.number)
        return count

    def found_durable(self, slot: SlotKey, num_frames: int) -> list[Round]:
        """Count frames of a lost member that never landed but are durable. Returns the rounds that this completes."""
        self.accepted_frames += num_frames
        completed: list[Round] = []
        for round_ in list(self._pending.values()):
            if slot not in round_.pending:
                continue
            less = min(num_frames, round_.frames[slot])
            num_frames -= less
            round_.frames[slot] -= less
            self.outstanding_frames -= less
            if not round_.frames[slot]:
                completed += self._go_on_without(round_, slot)
        return completed

    def forget_member(self, slot: SlotKey, *, only_preempted: bool = False) -> list[Round]:
        """Rounds that wait for a slot continue without it. `only_preempted`: the slot will be filled again; other
        rounds wait.
        """
        completed: list[Round] = []
        for round_ in list(self._pending.values()):
            if slot in round_.pending and (round_.is_preempted or not only_preempted):
                completed += self._go_on_without(round_, slot)
        return completed

    def _go_on_without(self, round_: Round, slot: SlotKey) -> list[Round]:
        """Returns the round where it waits for no one any more."""
        self._excuse(round_, slot)
        if not round_.frames:
            self._close_round(round_.number)
            return []
        return [round_] if round_.is_complete else []

    def waits_for_earlier(self, round_number: int) -> bool:
        """True while a sync round must wait for earlier ones, because a worker's frames are delivered in order."""
        return self.mode == "sync" and any(
            number < round_number and not other.is_complete for number, other in self._open.items()
        )

    def drain(self) -> list[Round]:
        """Request no more frames. Returns the rounds that this completes, without lost members."""
        self.is_draining = True
        lost = {slot for round_ in self._pending.values() for slot in round_.pending}
        return [completed for slot in sorted(lost) for completed in self.forget_member(slot)]

    def accepted(self, round_number: int) -> None:
        """Count the frames of a round that entered the queue."""
        self.accepted_frames += self._close_round(round_number)

    def forget_open(self) -> list[Round]:
        """Collect the frames of rounds that are not accepted again. No ticket may be out. Returns the incomplete
        rounds.
        """
        incomplete = [round_ for round_ in self._open.values() if not round_.is_complete]
        self._open.clear()
        self._pending.clear()
        self.outstanding_frames = 0
        return incomplete
