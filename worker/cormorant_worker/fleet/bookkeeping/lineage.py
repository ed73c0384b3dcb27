"""What each slot of a fleet has used up, so that nothing is handed out twice: streams, trajectory ids, warm-up frames.

Guarded by the fleet's condition.
"""

import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.trajectories import MAX_EPOCH, trajectory_base
from cormorant_worker.errors import StateError
from cormorant_worker.fleet.bookkeeping.scheduler import Slot
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.worker.messages import Sealed

_BATCHES_AHEAD = 4
"""Batches that a worker may have put into a dataset beyond the last one that its fleet heard of, and some to spare."""


class Lineage:
    def __init__(self, *, epoch: int, written: Mapping[Slot, int], warmup_frames: int) -> None:
        """Begin an epoch.

        Args:
            epoch: a number that no fleet of this job had before.
            written: frames that the dataset has of each slot.
            warmup_frames: random frames that the job still wants.
        """
        self.epoch = epoch
        self.run = uuid.uuid4().hex
        """Names this fleet, in states that it saves."""
        self.attempts: dict[Slot, int] = {}
        """The last stream that each slot began: in this fleet, or in one whose state was restored."""
        self.written: defaultdict[Slot, int] = defaultdict(int, written)
        """Frames that came from each slot, with those that the dataset had; they never go back."""
        self._next_trajectory: dict[Slot, int] = {}
        """Higher than any id that came from the slot."""
        self._warmup_frames = warmup_frames
        """Random frames that belong to no slot yet."""
        self._warmup: dict[Slot, int] | None = None
        """Random frames that each slot still owes; None until they are shared out."""
        self._shares: dict[Slot, int] = {}
        """What each slot owed first."""

    def begin(self, place: WorkerPlace, *, first_free: int = 0, batch_ids: int = 0) -> WorkerPlace:
        """The place with a stream of its own.

        Args:
            first_free: the first attempt that has no part in the dataset.
            batch_ids: ids that one batch can use.
        """
        slot = place.group, place.index
        attempt = self.attempts[slot] = max(self.attempts.get(slot, -1) + 1, first_free)
        place = replace(place, attempt=attempt, epoch=self.epoch)
        after = self._next_trajectory.get(slot, 0)
        after += _BATCHES_AHEAD * batch_ids if after else 0
        return replace(place, first_trajectory=trajectory_base(place.seeds, after=after))

    def is_last(self, saved: FleetState, slot: Slot, dataset: str) -> bool:
        """True when nothing has come from a slot since a state was saved, as far as this fleet or its dataset knows."""
        knows = saved.run == self.run or bool(dataset and saved.dataset == dataset)
        return knows and saved.written.get("{}-{}".format(*slot)) == self.written[slot]

    def join(self, saved: FleetState) -> None:
        """Go on after a state's fleet: what it or its successors may have used up is not used again."""
        if saved.run != self.run and saved.epoch >= self.epoch:
            if saved.epoch >= MAX_EPOCH:
                raise StateError(f"the state's epoch {saved.epoch} is the last one; start a new job from its weights")
            self.epoch = saved.epoch + 1
        for name, attempt in saved.attempts.items():
            group, _, index = name.rpartition("-")
            slot = group, int(index)
            self.attempts[slot] = max(self.attempts.get(slot, -1), attempt)

    def landed(self, slot: Slot, sealed: Sealed) -> None:
        """A batch has come from a slot."""
        self.written[slot] += sealed.num_frames
        self._next_trajectory[slot] = max(self._next_trajectory.get(slot, 0), sealed.next_trajectory)
        if self._warmup and slot in self._warmup:
            self.owe(slot, self._warmup[slot] - sealed.random_frames)

    def found(self, slot: Slot, frames: int) -> None:
        """The dataset has so many frames more of a slot than its fleet heard of; fewer, where negative."""
        self.written[slot] += frames

    # -- random frames -----------------------------------------------------------------------------------------

    def warmup_of(self, slot: Slot, slots: Collection[Slot]) -> int:
        """Random frames that the next worker of a slot begins with: its share, less what came from the slot.

        The first workers share all of them. A slot that is added later has what slots that were given up still owed.
        """
        if self._warmup is None:
            share, rest = divmod(self._warmup_frames, len(slots))
            self._warmup = {known: share + (i < rest) for i, known in enumerate(slots)}
            self._warmup_frames = 0
            self._shares = dict(self._warmup)
        if slot not in self._warmup:
            self._warmup[slot], self._warmup_frames = self._warmup_frames, 0
        return self._warmup[slot]

    def owe(self, slot: Slot, frames: int) -> None:
        """A slot still owes so many random frames."""
        if self._warmup is not None:
            self._warmup[slot] = max(0, frames)

    def owe_all(self) -> dict[Slot, int]:
        """What came so far is dropped: every slot owes its first share again. Returns those."""
        if self._warmup is not None:
            self._warmup |= self._shares
        return self._shares

    def give_up(self, slot: Slot) -> None:
        """The slot will not be filled: another one collects the random frames that it owed."""
        self._warmup_frames += (self._warmup or {}).pop(slot, 0)
