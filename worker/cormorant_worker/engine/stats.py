"""A fleet's books as numbers for others."""

from collections import Counter
from typing import TYPE_CHECKING

from cormorant_worker.engine.protocol import FleetStats

if TYPE_CHECKING:
    from cormorant_worker.engine.crew import Crew
    from cormorant_worker.engine.deliveries import Deliveries
    from cormorant_worker.engine.schedule import Schedule


def fleet_stats(crew: "Crew", schedule: "Schedule", deliveries: "Deliveries") -> FleetStats:
    """The whole fleet at this moment. The caller holds the fleet's condition."""
    workers = tuple(member.stats(is_paused=crew.is_paused) for _, member in sorted(crew.members.items()))
    members, tally = tuple(crew.members.values()), crew.tally
    desired = Counter(group for group, _ in crew.places)
    groups = {
        group.name: tally.group(
            group.name, (member for member in members if member.place[0] == group.name), desired=desired[group.name]
        )
        for group in crew.job.spec.worker_groups
    }
    queue = crew.job.spec.output.queue
    has_store = crew.store is not None
    return FleetStats(
        frames=schedule.accepted_frames,
        settled_frames=max(0, schedule.accepted_frames - deliveries.unsettled_frames),
        stepped_frames=sum(group.stepped_frames for group in groups.values()),
        total_frames=schedule.total_frames,
        episodes=tally.episodes,
        recent_returns=tuple(tally.returns),
        recent_lengths=tuple(tally.lengths),
        version=crew.version,
        dropped=dict(deliveries.dropped),
        restarts=sum(crew.restarts.values()),
        queued_batches=deliveries.num_waiting,
        paused=crew.is_paused,
        workers=workers,
        groups=groups,
        queue_capacity=queue.capacity_batches if queue is not None else 0,
        queue_waits_s=tally.waits_s,
        undurable_frames=sum(m.landed_frames - m.durable_frames for m in members) if has_store else 0,
    )
