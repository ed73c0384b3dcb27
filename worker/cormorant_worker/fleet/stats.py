"""A fleet's books as numbers for others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cormorant_worker.fleet.protocol import FleetStats

if TYPE_CHECKING:
    from cormorant_worker.fleet.batch_queue import BatchQueue
    from cormorant_worker.fleet.scheduler import Scheduler
    from cormorant_worker.fleet.worker_handle import WorkerHandle
    from cormorant_worker.fleet.worker_pool import WorkerPool


_SWEPT = 256
"""Workers whose pulses are looked at for an answer: of a larger fleet, the others' were within the last second."""


def fleet_stats(crew: "WorkerPool", schedule: "Scheduler", deliveries: "BatchQueue") -> FleetStats:
    """The whole fleet at this moment, without `workers`. The caller holds the fleet's condition."""
    crew.watch.sweep(_SWEPT)
    tally = crew.tally
    sizes = crew.places.sizes
    groups = {
        group.name: tally.group(group.name, desired=sizes.get(group.name, 0)) for group in crew.job.spec.worker_groups
    }
    queue = crew.job.spec.output.queue
    has_store = crew.store is not None
    return FleetStats(
        frames=schedule.accepted_frames,
        settled_frames=max(0, schedule.accepted_frames - deliveries.unsettled_frames),
        stepped_frames=tally.stepped_frames,
        total_frames=schedule.total_frames,
        episodes=tally.episodes,
        recent_returns=tuple(tally.returns),
        recent_lengths=tuple(tally.lengths),
        version=crew.version,
        dropped=dict(deliveries.dropped),
        restarts=crew.replacements.count,
        queued_batches=deliveries.num_waiting,
        paused=crew.is_paused,
        workers=(),
        groups=groups,
        queue_capacity=queue.capacity_batches if queue is not None else 0,
        queue_waits_s=tally.waits_s,
        undurable_frames=sum(m.landed_frames - m.durable_frames for m in crew.members.values()) if has_store else 0,
    )


def with_workers(stats: FleetStats, members: "Sequence[WorkerHandle]") -> FleetStats:
    """The same with each worker. Without the condition: it costs as much as there are workers."""
    ordered = sorted(members, key=lambda member: member.place)
    return replace(stats, workers=tuple(member.stats(is_paused=stats.paused) for member in ordered))
