"""Who may collect how many frames next: pure bookkeeping, without processes, clocks or memory.

A *round* is what the consumer gets at once: one ticket in async mode, one ticket of every worker in sync mode.

    open (tickets out) -> complete (all landed) -> accepted (in the queue: its frames count) -> taken
         |                     |                        |
         +-- crash: the lost tickets' frames are        +-- dropped: drop_oldest (they count), too stale (they
             collected again                                 do not, and are collected again)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["sync", "async"]
Slot = tuple[str, int]
"""A worker's place: (group, index)."""

_ROUNDING = 1e-9
TICKETS_AHEAD = 2
"""Tickets a worker may hold: the one it works on, and the next, so that it never waits for the fleet's answer."""


@dataclass(slots=True)
class Round:
    """Tickets that are delivered together."""

    number: int
    frames: dict[Slot, int]
    """Frames asked of each member."""
    pending: set[Slot] = field(default_factory=set)
    """Members that have no ticket yet, because they have just been lost."""
    landed: set[Slot] = field(default_factory=set)
    """Members whose batch is complete."""
    is_preempted: bool = False
    """Enough have landed: the others hand over what they have, and nobody is waited for who has nothing."""

    @property
    def is_complete(self) -> bool:
        """True when every member's batch has landed."""
        return len(self.landed) == len(self.frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A ticket that may be handed out now."""

    round: Round
    slot: Slot
    num_frames: int


class Schedule:
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
        """Frames that the output has taken; what `totalFrames` counts."""
        self.is_draining = False
        """No ticket goes out any more."""
        self._open: dict[int, Round] = {}
        self._next_number = 0
        self._last_number: dict[Slot, int] = {}
        """The last round that each worker got a ticket of, in async mode."""

    # -- what there is left ------------------------------------------------------------------------------------

    @property
    def outstanding_frames(self) -> int:
        """Frames that are asked for and not accepted yet."""
        return sum(sum(r.frames.values()) for r in self._open.values())

    @property
    def landed_frames(self) -> int:
        """Frames that were collected, those that the output has not taken yet among them."""
        return self.accepted_frames + sum(r.frames[slot] for r in self._open.values() for slot in r.landed)

    @property
    def remaining_frames(self) -> int | None:
        """Frames that nobody has been asked for yet; None without an end."""
        if self.total_frames is None:
            return None
        return self.total_frames - self.accepted_frames - self.outstanding_frames

    @property
    def is_done(self) -> bool:
        """True when every frame that will be is accepted, and no ticket is out."""
        if self._open:
            return False
        return self.is_draining or (self.total_frames is not None and self.accepted_frames >= self.total_frames)

    @property
    def num_open(self) -> int:
        """Rounds that are not accepted yet."""
        return len(self._open)

    def round_up(self, num_envs: int, *, num_workers: int) -> None:
        """Ask for whole steps of `num_envs` environments, of every worker in sync mode. Called before any decision."""
        self.frames_per_batch += -self.frames_per_batch % num_envs
        if self.total_frames is not None:
            self.total_frames += -self.total_frames % (num_envs * (num_workers if self.mode == "sync" else 1))

    # -- decisions ---------------------------------------------------------------------------------------------

    def grants(
        self, tickets_held: dict[Slot, int], *, num_workers: int, ahead_of_consumer: int, room: int
    ) -> list[Grant]:
        """Tickets to hand out now.

        Args:
            tickets_held: the workers that may collect, and how many tickets each of them holds.
            num_workers: how many workers the fleet is meant to have: a sync round waits for all of them.
            ahead_of_consumer: rounds that are complete and not taken, and the one that the consumer still works on.
            room: slots of memory that are free.
        """
        if self.is_draining:
            return []
        held = dict(tickets_held)
        granted = list(self._regrants(held, room))
        room -= len(granted)
        if self.mode == "sync":
            if len(held) == num_workers:
                granted += self._sync_grants(held, ahead_of_consumer, room)
        else:
            granted += self._async_grants(held, ahead_of_consumer, room)
        return granted

    def _regrants(self, held: dict[Slot, int], room: int) -> Iterable[Grant]:
        """Tickets of members that were lost, for whoever fills their slot now."""
        for open_round in self._open.values():
            for slot in sorted(open_round.pending):
                if slot in held and room > 0:
                    room -= 1
                    held[slot] += 1
                    open_round.pending.discard(slot)
                    yield Grant(round=open_round, slot=slot, num_frames=open_round.frames[slot])

    def _sync_grants(self, held: dict[Slot, int], ahead: int, room: int) -> list[Grant]:
        granted: list[Grant] = []
        while (
            held
            and max(held.values()) < self._depth
            and room >= len(held)
            and self._is_fresh_enough(ahead)
            and (frames := self._sync_frames(sorted(held)))
        ):
            opened = self._open_round(frames)
            for slot, count in frames.items():
                held[slot] += 1
                granted.append(Grant(round=opened, slot=slot, num_frames=count))
            room -= len(frames)
        return granted

    def _async_grants(self, held: dict[Slot, int], ahead: int, room: int) -> list[Grant]:
        granted: list[Grant] = []
        # Idle workers first, so that scarce room keeps as many of them busy as possible; those who have waited longest
        # before others, so that a slow consumer gets frames of all of them.
        waiting = sorted(held, key=lambda slot: (self._last_number.get(slot, -1), slot))
        for depth in range(self._depth):
            for slot in waiting:
                if held[slot] > depth or room <= 0 or not self._is_fresh_enough(ahead):
                    continue
                remaining = self.remaining_frames
                count = self.frames_per_batch if remaining is None else min(self.frames_per_batch, remaining)
                if count <= 0:
                    return granted
                opened = self._open_round({slot: count})
                granted.append(Grant(round=opened, slot=slot, num_frames=count))
                self._last_number[slot] = opened.number
                held[slot] += 1
                room -= 1
        return granted

    def _sync_frames(self, slots: list[Slot]) -> dict[Slot, int]:
        remaining = self.remaining_frames
        if remaining is None or remaining >= self.frames_per_batch * len(slots):
            return dict.fromkeys(slots, self.frames_per_batch)
        share, rest = divmod(max(remaining, 0), len(slots))
        frames = {slot: share + (i < rest) for i, slot in enumerate(slots)}
        return {slot: count for slot, count in frames.items() if count}

    @property
    def _depth(self) -> int:
        return TICKETS_AHEAD if self.max_staleness is None else 1

    def _is_fresh_enough(self, ahead: int) -> bool:
        """A round opened now is consumed after `ahead` + open others; the learner publishes once a round at most."""
        return self.max_staleness is None or ahead + len(self._open) <= self.max_staleness

    def _open_round(self, frames: dict[Slot, int]) -> Round:
        opened = Round(number=self._next_number, frames=frames)
        self._next_number += 1
        self._open[opened.number] = opened
        return opened

    # -- events ------------------------------------------------------------------------------------------------

    def landed(self, round_number: int, slot: Slot, num_frames: int) -> Round:
        """A member's batch is complete. What it has less than was asked for is collected later."""
        found = self._open[round_number]
        found.landed.add(slot)
        found.frames[slot] = num_frames
        return found

    def preempt(self, found: Round) -> list[Slot]:
        """A batch of a round has landed: if enough have by now, those who are to hand over what they have."""
        enough = math.ceil(self.preemptive_threshold * len(found.frames) - _ROUNDING)
        if self.preemptive_threshold >= 1 or found.is_preempted or len(found.landed) < enough:
            return []
        found.is_preempted = True
        for slot in found.pending:
            del found.frames[slot]
        found.pending.clear()
        return sorted(set(found.frames) - found.landed)

    def lost(self, round_number: int, slot: Slot) -> int:
        """A member died with its ticket. Returns the frames that have to be collected again.

        In sync mode whoever fills the slot next gets the same ticket; in async mode the frames go back to the rest.
        """
        found = self._open[round_number]
        count = found.frames[slot]
        if self.mode == "sync":
            found.pending.add(slot)
        else:
            del self._open[round_number]
        return count

    def forget_member(self, slot: Slot, *, only_preempted: bool = False) -> list[Round]:
        """A slot will not be filled again (the fleet shrank): rounds that wait for it go on without it.

        Args:
            slot: whose member is gone.
            only_preempted: it will be filled again, and only rounds that wait for nobody go on.
        """
        completed = []
        for found in list(self._open.values()):
            if slot in found.pending and (found.is_preempted or not only_preempted):
                found.pending.discard(slot)
                del found.frames[slot]
                if not found.frames:
                    del self._open[found.number]
                elif found.is_complete:
                    completed.append(found)
        return completed

    def waits_for_earlier(self, found: Round) -> bool:
        """True while a sync round must not overtake others: a worker's frames are delivered in their order."""
        return self.mode == "sync" and any(
            number < found.number and not other.is_complete for number, other in self._open.items()
        )

    def drain(self) -> list[Round]:
        """Ask for nothing more. Returns the rounds that are complete now, without the members that were lost."""
        self.is_draining = True
        lost = {slot for found in self._open.values() for slot in found.pending}
        return [completed for slot in sorted(lost) for completed in self.forget_member(slot)]

    def accepted(self, round_number: int) -> None:
        """A round entered the queue: its frames count."""
        self.accepted_frames += sum(self._open.pop(round_number).frames.values())

    def forget_open(self) -> None:
        """No round that is not accepted will ever be: what is missing is collected anew. No ticket may be out."""
        self._open.clear()

    def take_back(self, num_frames: int) -> None:
        """Accepted frames turned out to be lost or too stale: they are collected again."""
        self.accepted_frames -= num_frames
