"""What becomes of the frames of a worker that has ended: what is kept, what is collected again, what is dropped.

Called by the fleet's thread with the fleet's condition held.
"""

from collections.abc import Iterable

from cormorant_worker.fleet.batch_queue import BatchQueue
from cormorant_worker.fleet.lineage import Lineage
from cormorant_worker.fleet.scheduler import Scheduler
from cormorant_worker.fleet.worker_handle import TicketOut, WorkerHandle


def settle(
    member: WorkerHandle,
    tickets: Iterable[TicketOut],
    schedule: Scheduler,
    deliveries: BatchQueue,
    lineage: Lineage,
    *,
    durable_frames: int | None,
    reason: str,
) -> int:
    """Account for everything that a worker has stepped.

    Args:
        member: the worker. It has ended: its part of the dataset does not grow any more.
        tickets: those that it held.
        schedule: counts what is collected again.
        deliveries: gets the tickets' memory back, and counts what was dropped.
        lineage: counts what came from the slot.
        durable_frames: frames in its part of the dataset, by the manifest: the last batch may be there though the
            fleet has not heard of it, and batches that it heard of may not. None without a dataset.
        reason: why frames were dropped.

    Returns:
        Frames that are collected again.
    """
    slot, again = member.place, 0
    for out in tickets:
        again += schedule.lost(out.round.number, slot)
        assert deliveries.blocks is not None
        deliveries.blocks.give_back(out.block_index)
    if deliveries.blocks is not None:
        deliveries.blocks.forget(member.link.pid)
    kept = member.landed_frames if durable_frames is None else durable_frames
    unheard = kept - member.landed_frames
    if unheard < 0:
        schedule.take_back(-unheard)
    elif unheard > 0:
        deliveries.complete(schedule.found(slot, unheard))
    lineage.written[slot] += unheard
    deliveries.count_dropped(reason, max(0, member.stepped_frames - kept - member.dropped_frames))
    return max(0, again - unheard)
