"""Recording rules and alerts as data. `rule_file.py` writes them for Prometheus."""

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["info", "warning", "critical"]
JOB = "namespace, collectorjob"
"""Labels that identify a job: names are unique only within a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A series that Prometheus computes from others."""

    record: str
    expr: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that needs attention."""

    alert: str
    expr: str
    for_: str
    severity: Severity
    summary: str
    """One line, with labels as `{{ $labels.collectorjob }}`."""
    description: str
    labels: dict[str, str] = field(default_factory=dict)


RECORDINGS = (
    Recording(
        record="collectorjob:cormorant_stepped_frames:rate2m",
        expr=f"sum by ({JOB}) (rate(cormorant_stepped_frames_total[2m]))",
        help="Frames per second of a job.",
    ),
    Recording(
        record="group:cormorant_stepped_frames:rate2m",
        expr=f"sum by ({JOB}, group) (rate(cormorant_stepped_frames_total[2m]))",
        help="Frames per second of a worker group.",
    ),
    Recording(
        record="group_phase:cormorant_phase:ratio_rate2m",
        expr=(
            f"sum by ({JOB}, group, phase) (rate(cormorant_phase_seconds_total[2m]))"
            f" / on ({JOB}, group) group_left () sum by ({JOB}, group) (rate(cormorant_phase_seconds_total[2m]))"
        ),
        help="Share of worker time spent in each phase.",
    ),
    Recording(
        record="collectorjob:cormorant_weight_update_duration_seconds:p50_rate10m",
        expr=(
            f"histogram_quantile(0.5, sum by ({JOB}, le)"
            ' (rate(cormorant_weight_update_duration_seconds_bucket{stage="total"}[10m])))'
        ),
        help="Median latency of a publish.",
    ),
    Recording(
        record="collectorjob:cormorant_weight_update_duration_seconds:p99_rate10m",
        expr=(
            f"histogram_quantile(0.99, sum by ({JOB}, le)"
            ' (rate(cormorant_weight_update_duration_seconds_bucket{stage="total"}[10m])))'
        ),
        help="99th percentile latency of a publish.",
    ),
    Recording(
        record="collectorjob:cormorant_batch_staleness_versions:p95_rate10m",
        expr=f"histogram_quantile(0.95, sum by ({JOB}, le) (rate(cormorant_batch_staleness_versions_bucket[10m])))",
        help="95th percentile staleness of batches, in versions.",
    ),
    Recording(
        record="collectorjob:cormorant_queue_wait:ratio_rate10m",
        expr=f"sum by ({JOB}, side) (rate(cormorant_queue_wait_seconds_total[10m]))",
        help="Share of time that one side of the queue waited for the other.",
    ),
    Recording(
        record="collectorjob:cormorant_running:bool",
        expr=f'max by ({JOB}) (cormorant_head_state{{state="running"}})',
        help="1 while a job is collecting: not starting, paused, draining or finished.",
    ),
)

_RUNNING = f"and on ({JOB}) (collectorjob:cormorant_running:bool == 1)"
# Workers that wait for a consumer are not at fault.
_NOT_WAITING = (
    f'unless on ({JOB}) (sum by ({JOB}) (rate(cormorant_queue_wait_seconds_total{{side="producer"}}[2m])) > 0.5)'
)
_WHO = "{{ $labels.namespace }}/{{ $labels.collectorjob }}"

ALERTS = (
    Alert(
        alert="CormorantStalled",
        expr=f"collectorjob:cormorant_stepped_frames:rate2m == 0 {_RUNNING} {_NOT_WAITING}",
        for_="3m",
        severity="critical",
        summary=f"{_WHO} is not collecting any frames",
        description="The job is running and its queue has room, but no worker has stepped for 3 minutes.",
    ),
    Alert(
        alert="CormorantFpsDropped",
        expr=(
            "collectorjob:cormorant_stepped_frames:rate2m"
            " < 0.5 * avg_over_time(collectorjob:cormorant_stepped_frames:rate2m[1h])"
            f" and collectorjob:cormorant_stepped_frames:rate2m > 0 {_RUNNING} {_NOT_WAITING}"
        ),
        for_="10m",
        severity="warning",
        summary=f"{_WHO} collects less than half as fast as in the last hour",
        description="It collects {{ $value | humanize }} frames per second although its queue has room.",
    ),
    Alert(
        alert="CormorantHeadFailed",
        expr=f'max by ({JOB}) (cormorant_head_state{{state="failed"}}) == 1',
        for_="1m",
        severity="critical",
        summary=f"the fleet of {_WHO} has failed",
        description="See the head's log (fleet_failed) or GET /v1/status for the reason.",
    ),
    Alert(
        alert="CormorantWorkersMissing",
        expr=(
            f'sum by ({JOB}, group) (cormorant_workers{{state="ready"}})'
            f' < sum by ({JOB}, group) (cormorant_workers{{state="desired"}}) {_RUNNING}'
        ),
        for_="15m",
        severity="warning",
        summary=f"group {{{{ $labels.group }}}} of {_WHO} has too few workers",
        description="Only {{ $value }} workers are ready, fewer than desired.",
    ),
    Alert(
        alert="CormorantWorkerRestartLoop",
        expr=f"sum by ({JOB}, group) (increase(cormorant_worker_restarts_total[15m])) > 3",
        for_="0m",
        severity="warning",
        summary=f"workers of {_WHO} are restarting in a loop",
        description="{{ $value | humanize }} workers of group {{ $labels.group }} were replaced in 15 minutes.",
    ),
    Alert(
        alert="CormorantFramesLost",
        expr=(
            f'sum by ({JOB}) (increase(cormorant_frames_dropped_total{{reason="crash"}}[30m]))'
            f" > 0.05 * sum by ({JOB}) (increase(cormorant_stepped_frames_total[30m]))"
        ),
        for_="10m",
        severity="warning",
        summary=f"{_WHO} loses more than 5 % of its frames to worker crashes",
        description="{{ $value | humanize }} frames were lost in 30 minutes and will be collected again.",
    ),
    Alert(
        alert="CormorantStaleWeights",
        expr=(
            f"time() - max by ({JOB}) (cormorant_weight_last_applied_timestamp_seconds) > 1800"
            f" and on ({JOB}) (max by ({JOB}) (cormorant_consumers) > 0) {_RUNNING}"
        ),
        for_="5m",
        severity="warning",
        summary=f"no weights are published to {_WHO}",
        description="A learner takes batches, but the last weights were applied {{ $value | humanizeDuration }} ago.",
    ),
    Alert(
        alert="CormorantHighStaleness",
        expr=f"collectorjob:cormorant_batch_staleness_versions:p95_rate10m > 8 {_RUNNING}",
        for_="10m",
        severity="warning",
        summary=f"batches of {_WHO} come from outdated policies",
        description="5 % of the batches are at least {{ $value | humanize }} versions old when they are delivered.",
    ),
    Alert(
        alert="CormorantUpdateHung",
        expr=(
            f"max by ({JOB}) (cormorant_weight_update_in_progress) == 1"
            f" unless on ({JOB}) (max by ({JOB}) (changes(cormorant_policy_version_published[5m])) > 0) {_RUNNING}"
        ),
        for_="5m",
        severity="warning",
        summary=f"a weight update of {_WHO} does not reach all workers",
        description="A publish has been in progress for 5 minutes, and no newer one has arrived.",
    ),
    Alert(
        alert="CormorantUpdatesFailing",
        expr=f'sum by ({JOB}) (increase(cormorant_weight_updates_total{{result=~"failed|rejected"}}[10m])) > 2',
        for_="0m",
        severity="warning",
        summary=f"weight updates of {_WHO} are failing",
        description="{{ $value | humanize }} publishes in the last 10 minutes were rejected or failed.",
    ),
    Alert(
        alert="CormorantQueueFull",
        expr=f'collectorjob:cormorant_queue_wait:ratio_rate10m{{side="producer"}} > 0.8 {_RUNNING}',
        for_="10m",
        severity="info",
        summary=f"workers of {_WHO} are waiting for the learner",
        description="The queue is full {{ $value | humanizePercentage }} of the time; fewer workers would suffice.",
    ),
    Alert(
        alert="CormorantQueueStarved",
        expr=(
            f'collectorjob:cormorant_queue_wait:ratio_rate10m{{side="consumer"}} > 0.8'
            f" and on ({JOB}) (max by ({JOB}) (cormorant_consumers) > 0) {_RUNNING}"
        ),
        for_="10m",
        severity="info",
        summary=f"the learner of {_WHO} is waiting for batches",
        description="The queue is empty {{ $value | humanizePercentage }} of the time; more workers would help.",
    ),
    Alert(
        alert="CormorantPausedTooLong",
        expr=f"min by ({JOB}) (cormorant_paused) == 1",
        for_="4h",
        severity="info",
        summary=f"{_WHO} has been paused for 4 hours",
        description="Its pods still hold their CPUs and devices. Suspend the job to release them.",
    ),
    Alert(
        alert="CormorantSinkLagging",
        expr=(
            f"max by ({JOB}) (cormorant_sink_lag_frames)"
            f" > on ({JOB}) (600 * collectorjob:cormorant_stepped_frames:rate2m > 0) {_RUNNING}"
        ),
        for_="10m",
        severity="warning",
        summary=f"the dataset of {_WHO} lags behind",
        description="{{ $value | humanize }} frames, more than 10 minutes of work, are not durable yet.",
    ),
    Alert(
        alert="CormorantReconcileErrors",
        expr="sum by (namespace, handler) (rate(cormorant_operator_reconcile_errors_total[10m])) > 0.05",
        for_="10m",
        severity="warning",
        summary="the operator's reconciles are failing",
        description="{{ $value | humanize }} errors per second in {{ $labels.handler }}; see the operator's log.",
    ),
    Alert(
        alert="CormorantNoLeader",
        # Without a single operator there is no series to compare.
        expr="max by (namespace) (cormorant_operator_leader) == 0 or absent(cormorant_operator_leader)",
        for_="5m",
        severity="warning",
        summary="no operator is leading, or none is scraped",
        description="Running jobs continue, but pods are not replaced and changes to jobs are not applied.",
    ),
    Alert(
        alert="CormorantHeadsSilent",
        expr='sum by (namespace) (cormorant_operator_heads{state="silent"}) >= 3 and '
        'sum by (namespace) (cormorant_operator_heads{state="silent"}) '
        "> 0.5 * sum by (namespace) (cormorant_operator_heads)",
        for_="5m",
        severity="warning",
        summary="most heads do not answer the operator",
        description="{{ $value }} heads do not respond: probably the operator's network. Jobs continue.",
    ),
    Alert(
        alert="CormorantJobFailed",
        expr='max by (job_namespace, collectorjob) (cormorant_operator_job_phase{phase="Failed"}) == 1',
        for_="0m",
        severity="warning",
        summary="{{ $labels.job_namespace }}/{{ $labels.collectorjob }} has failed",
        description="The job will not restart by itself. Run kubectl describe collectorjob for the reason.",
    ),
)
