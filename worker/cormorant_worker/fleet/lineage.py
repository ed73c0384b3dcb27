"""Random streams, trajectory ids and random frames that slots have used, so that none is issued twice.

Guarded by the fleet's condition.
"""

import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.trajectories import MAX_EPOCH, trajectory_base
from cormorant_worker.errors import StateError
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.slot import Slot
from cormorant_worker.worker.messages import Sealed

_BATCHES_AHEAD = 4
"""Batches that a worker may have put into a dataset beyond the last one that its fleet heard of, and some to spare."""


class Lineage:
    """Writes the fields of slots that record this."""

    def __init__(self, *, epoch: int, warmup_frames: int) -> None:
        self.epoch = epoch
        """A number that no fleet of this job had before."""
        self.run = uuid.uuid4().hex
        """Names this fleet, in states that it saves."""
        self._warmup_frames = warmup_frames
        """Random frames that the job still wants and that belong to no slot yet."""
        self._is_shared_out = False

    def begin(self, slot: Slot, place: WorkerPlace, *, first_free: int = 0, batch_ids: int = 0) -> WorkerPlace:
        """The place of the slot's next attempt, at least `first_free`, with a random stream that was never used, and
        trajectory ids past those of some more batches of `batch_ids`.
        """
        slot.attempt = max(slot.attempt + 1, first_free)
        after = slot.next_trajectory + _BATCHES_AHEAD * batch_ids if slot.next_trajectory else 0
        place = replace(place, attempt=slot.attempt, epoch=self.epoch, first_trajectory=after)
        return replace(place, first_trajectory=trajectory_base(place))

    def is_last(self, saved: FleetState, slot: Slot, dataset: str) -> bool:
        """True if a slot has delivered nothing since a state was saved, according to this fleet and its dataset."""
        knows = saved.run == self.run or bool(dataset and saved.dataset == dataset)
        return knows and saved.written.get(slot.name) == slot.written

    def join(self, saved: FleetState, slots: Collection[Slot]) -> None:
        """Continue a state's fleet, with these slots: nothing that it or its successors may have used is used again."""
        if saved.run != self.run and saved.epoch >= self.epoch:
            if saved.epoch >= MAX_EPOCH:
                raise StateError(f"the state's epoch {saved.epoch} is the last one; start a new job from its weights")
            self.epoch = saved.epoch + 1
        for slot in slots:
            slot.attempt = max(slot.attempt, saved.attempts.get(slot.name, -1))

    def landed(self, slot: Slot, sealed: Sealed) -> None:
        """Record a batch of a slot."""
        slot.written += sealed.num_frames
        slot.next_trajectory = max(slot.next_trajectory, sealed.next_trajectory)
        if slot.warmup_frames:
            slot.warmup_frames = max(0, slot.warmup_frames - sealed.random_frames)

    # -- random frames -----------------------------------------------------------------------------------------

    def warmup_of(self, slot: Slot, slots: Sequence[Slot]) -> int:
        """Random frames of the slot's next worker: its share of all, or that of removed slots, less those delivered."""
        if not self._is_shared_out:
            self._is_shared_out = True
            share, rest = divmod(self._warmup_frames, len(slots))
            for i, known in enumerate(slots):
                known.warmup_frames = known.warmup_share = share + (i < rest)
            self._warmup_frames = 0
        if slot.warmup_frames is None:
            slot.warmup_frames = slot.warmup_share = self._warmup_frames
            self._warmup_frames = 0
        return slot.warmup_frames

    def give_up(self, slot: Slot) -> None:
        """Pass the random frames that a removed slot still owed to another slot."""
        self._warmup_frames += slot.warmup_frames or 0
        slot.warmup_frames = None
