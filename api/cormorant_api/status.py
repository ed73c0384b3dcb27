"""Builds the responses of `GET /v1/status` and `/v1/workers`. Pure functions."""

from dataclasses import asdict
from datetime import UTC, datetime

from cormorant_api.head import Head
from cormorant_contract.rest import status
from cormorant_worker.fleet.slot import WorkerStats
from cormorant_worker.fleet.stats import FleetStats, GroupStats

_NOT_READY = ("importing", "building")


def describe(head: Head, stats: FleetStats) -> status.Status:
    """Status of the whole job. Does not need `stats.workers`; O(1) in workers."""
    running = head.running
    counts = running.ledger.counts()
    dropped = dict(stats.dropped)
    if counts.stale_frames:
        dropped["stale_for_consumer"] = counts.stale_frames
    queue = head.job.spec.output.queue
    return status.Status(
        job=head.job.metadata.name,
        namespace=head.job.metadata.namespace,
        epoch=head.epoch,
        phase=_phase(head, stats),
        conditions=_conditions(head, stats),
        frames=status.FrameCounts(
            collected=stats.frames,
            settled=head.settled_frames(stats),
            target=stats.total_frames,
            per_second=round(head.rates.rate(), 1),
            stepped=stats.stepped_frames,
            delivered=counts.acked_frames,
            dropped=dropped,
        ),
        episodes=status.EpisodeReport(
            count=stats.episodes,
            mean_return=stats.mean_return,
            mean_length=stats.mean_length,
            metrics=stats.metric_means,
            tasks=tasks_of(stats),
        ),
        weights=status.WeightsReport(
            version=stats.version,
            min_applied_version=max(0, stats.min_version),
            update_state=running.updates.state_of(stats.version) or "",
        ),
        groups=tuple(_group(name, size, stats.groups[name]) for name, size in running.group_sizes.groups.items()),
        restarts=stats.restarts,
        pause_state=running.pauses.state,
        pauses=running.pauses.describe().leases,
        queue=status.QueueReport(
            capacity=queue.capacity_batches if queue is not None else 0,
            waiting=stats.queued_batches,
            ready=counts.ready,
            lent=counts.lent,
            oldest_lent_seconds=None if counts.oldest_lent_s is None else round(counts.oldest_lent_s, 1),
            acked=counts.acked,
            redelivered=counts.redelivered,
            consumer_wait_seconds=round(stats.queue_waits_s["consumer"], 3),
            ended=running.ledger.has_ended,
        ),
        consumers=running.ledger.consumers(),
        data_port=head.data_port,
        started_at=head.started_at,
        desired=running.group_sizes.describe(stats, paused=running.pauses.spec_paused),
        statistics={key: status.StatisticsReport(**asdict(found)) for key, found in stats.statistics.items()},
        inference={group: _inference(head, group, stats.groups[group]) for group in stats.inference},
        counts=head.job.spec.counts,
    )


def tasks_of(stats: FleetStats) -> dict[str, status.TaskReport]:
    """Episode results of each variant."""
    means: dict[str, dict[str, float | None]] = {task: {} for task in stats.task_episodes}
    # Read once: each access to this property computes every mean.
    for (name, task), mean in stats.task_metric_means.items():
        if task in means:
            means[task][name] = mean
    return {task: status.TaskReport(count=count, means=means[task]) for task, count in stats.task_episodes.items()}


def _group(name: str, size: int, stats: GroupStats) -> status.GroupReport:
    return status.GroupReport(
        name=name,
        desired=size,
        ready=stats.ready,
        idle_seconds=round(stats.spent_s["idle"], 3),
        worker_seconds=round(sum(stats.spent_s.values()), 3),
    )


def _inference(head: Head, group: str, stats: GroupStats) -> status.InferenceReport:
    rows, padded, acts, requests, wait_s, act_s = (
        head.rates.rate((group, name)) for name in ("rows", "padded_rows", "acts", "requests", "wait_s", "act_s")
    )
    return status.InferenceReport(
        rows_per_second=round(rows, 1),
        rows_per_act=round(rows / acts, 2) if acts else 0.0,
        padding=round(padded / (rows + padded), 3) if rows else 0.0,
        wait_ms=round(1000 * wait_s / requests, 3) if requests else 0.0,
        act_ms=round(1000 * act_s / acts, 3) if acts else 0.0,
        busy=round(act_s / max(1, stats.ready), 3),
    )


def describe_worker(head: Head, worker: WorkerStats, *, published: int) -> status.Worker:
    return status.Worker(
        id=worker.name,
        group=worker.name.rpartition("-")[0],
        ready=worker.phase not in _NOT_READY,
        phase=worker.phase,
        attempt=worker.attempt,
        version=worker.version,
        lag=max(0, published - max(0, worker.version)),
        frames=worker.frames,
        per_second=round(head.rates.rate_of(worker.name, worker.attempt), 1),
        env_restarts=worker.env_restarts,
        pid=worker.pid,
        device=worker.device,
    )


def _phase(head: Head, stats: FleetStats) -> status.Phase:
    running = head.running
    if head.failure or running.feeder.error is not None:
        return "Failed"
    if stats.is_collected and (running.ledger.has_ended or not head.has_queue):
        return "Completed"
    if head.is_draining:
        return "Draining"
    if stats.is_collected:
        return "Completing"
    return "Paused" if running.pauses.state == "paused" else "Running"


def _conditions(head: Head, stats: FleetStats) -> tuple[status.Condition, ...]:
    running = head.running
    wanted = sum(running.group_sizes.groups.values())
    ready = sum(group.ready for group in stats.groups.values())
    state = running.pauses.state
    workers = f"{ready} of {wanted} workers are ready"
    if wanted != (replicas := sum(map(head.job.spec.size_of, head.job.spec.worker_groups))):
        workers += f"; the manifest asks for {replicas}"
    return (
        _condition("Ready", bool(ready), "WorkersReady", "NoWorkers", workers),
        _progressing(head, stats),
        _condition("Paused", state == "paused", "Paused", "NotPaused", running.pauses.error),
        _condition("EnvironmentsFailing", bool(stats.env_failures), "KeepFailing", "NoFailures", stats.env_failures),
        _condition("WeightsMissing", bool(head.missing_weights), "Lost", "NothingLost", head.missing_weights),
        _condition("Failed", bool(head.failure), "FleetFailed", "FleetRuns", head.failure),
    )


def _progressing(head: Head, stats: FleetStats) -> status.Condition:
    """Whether frames are being collected; otherwise, what the fleet waits for."""
    starting = sum(group.starting for group in stats.groups.values())
    serving = [group.name for group in head.job.spec.worker_groups if group.serves]
    if sentence := wait_for_learner(head, stats):
        reason = "WaitingForConsumer"
    elif starting and not any(group.ready for group in stats.groups.values()):
        reason = "WaitingForWorkers"
        sentence = f"waiting for workers: {starting} are still importing code or building environments and the policy"
    elif serving and not any(stats.groups[name].ready for name in serving):
        reason = "WaitingForServers"
        sentence = f"waiting for inference servers: none of {', '.join(serving)} is ready; workers keep their rows"
    else:
        rate = head.rates.rate()
        return _condition("Progressing", rate > 0, "FramesCollected", "NoFrames", f"{rate:.0f} frames per second")
    return status.Condition(type="Progressing", status="False", reason=reason, message=sentence)


def wait_for_learner(head: Head, stats: FleetStats) -> str:
    """Message for a fleet that is idle because its queue is full and no consumer takes batches; empty otherwise, and
    while draining. Does not need `stats.workers`: the rate shows whether workers step.
    """
    running = head.running
    is_ready = any(group.ready for group in stats.groups.values())
    is_idle = is_ready and not (stats.paused or head.is_draining or head.rates.rate() > 0)
    if not is_idle or not stats.queued_batches or running.feeder.num_waiting:
        return ""
    consumers = running.ledger.consumers()
    if not consumers:
        return "waiting for a learner: no consumer has asked for batches yet"
    last_seen_at = max(consumer.last_seen_at for consumer in consumers)
    ago = max(0.0, (datetime.now(UTC) - last_seen_at).total_seconds())
    return f"waiting for a learner: the last one asked for batches {ago:.0f} s ago"


def _condition(kind: str, is_true: bool, yes: str, no: str, message: str) -> status.Condition:
    return status.Condition(
        type=kind, status="True" if is_true else "False", reason=yes if is_true else no, message=message
    )
