"""Recording rules and alerts as data. `rule_file.py` writes them for Prometheus."""

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["info", "warning", "critical"]
JOB = "namespace, collectorjob"
"""What tells one job from another: names are unique in a namespace only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A series that Prometheus computes from others."""

    record: str
    expr: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that somebody should know of."""

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
        help="Share of the workers' time that goes to each phase.",
    ),
    Recording(
        record="collectorjob:cormorant_weight_update_duration_seconds:p50_rate10m",
        expr=(
            f"histogram_quantile(0.5, sum by ({JOB}, le)"
            ' (rate(cormorant_weight_update_duration_seconds_bucket{stage="total"}[10m])))'
        ),
        help="Half of the publishes were applied faster.",
    ),
    Recording(
        record="collectorjob:cormorant_weight_update_duration_seconds:p99_rate10m",
        expr=(
            f"histogram_quantile(0.99, sum by ({JOB}, le)"
            ' (rate(cormorant_weight_update_duration_seconds_bucket{stage="total"}[10m])))'
        ),
        help="One publish in a hundred took longer.",
    ),
    Recording(
        record="collectorjob:cormorant_batch_staleness_versions:p95_rate10m",
        expr=f"histogram_quantile(0.95, sum by ({JOB}, le) (rate(cormorant_batch_staleness_versions_bucket[10m])))",
        help="One batch in twenty was older, in versions.",
    ),
    Recording(
        record="collectorjob:cormorant_queue_wait:ratio_rate10m",
        expr=f"sum by ({JOB}, side) (rate(cormorant_queue_wait_seconds_total[10m]))",
        help="Share of the time in which a side of the queue waited for the other.",
    ),
    Recording(
        record="collectorjob:cormorant_running:bool",
        expr=f'max by ({JOB}) (cormorant_head_state{{state="running"}})',
        help="1 while a job collects: not starting, paused, draining or finished.",
    ),
)

_RUNNING = f"and on ({JOB}) (collectorjob:cormorant_running:bool == 1)"
# Waiting for whoever takes batches is no fault of the workers.
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
        summary=f"{_WHO} collects nothing",
        description="The job runs, is not paused, has room in its queue, and no worker has stepped for minutes.",
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
        summary=f"{_WHO} is less than half as fast as in the last hour",
        description="{{ $value | humanize }} frames per second, with room in the queue.",
    ),
    Alert(
        alert="CormorantHeadFailed",
        expr=f'max by ({JOB}) (cormorant_head_state{{state="failed"}}) == 1',
        for_="1m",
        severity="critical",
        summary=f"the fleet of {_WHO} cannot go on",
        description="The head says why in its log (fleet_failed) and in GET /v1/status.",
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
        description="{{ $value }} workers are ready, fewer than the group should have.",
    ),
    Alert(
        alert="CormorantWorkerRestartLoop",
        expr=f"sum by ({JOB}, group) (increase(cormorant_worker_restarts_total[15m])) > 3",
        for_="0m",
        severity="warning",
        summary=f"workers of {_WHO} do not live long",
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
        summary=f"{_WHO} loses more than 5 % of its frames with its workers",
        description="{{ $value | humanize }} frames were lost in half an hour and are collected again.",
    ),
    Alert(
        alert="CormorantStaleWeights",
        expr=(
            f"time() - max by ({JOB}) (cormorant_weight_last_applied_timestamp_seconds) > 1800"
            f" and on ({JOB}) (max by ({JOB}) (cormorant_consumers) > 0) {_RUNNING}"
        ),
        for_="5m",
        severity="warning",
        summary=f"nobody publishes weights to {_WHO}",
        description="A learner takes batches, and the last weights were applied {{ $value | humanizeDuration }} ago.",
    ),
    Alert(
        alert="CormorantHighStaleness",
        expr=f"collectorjob:cormorant_batch_staleness_versions:p95_rate10m > 8 {_RUNNING}",
        for_="10m",
        severity="warning",
        summary=f"batches of {_WHO} come from old policies",
        description="One batch in twenty is {{ $value | humanize }} versions old or more when it is handed over.",
    ),
    Alert(
        alert="CormorantUpdateHung",
        expr=(
            f"max by ({JOB}) (cormorant_weight_update_in_progress) == 1"
            f" unless on ({JOB}) (max by ({JOB}) (changes(cormorant_policy_version_published[5m])) > 0) {_RUNNING}"
        ),
        for_="5m",
        severity="warning",
        summary=f"{_WHO} has weights that do not reach all workers",
        description="A publish is under way for minutes, and no newer one has come.",
    ),
    Alert(
        alert="CormorantUpdatesFailing",
        expr=f'sum by ({JOB}) (increase(cormorant_weight_updates_total{{result=~"failed|rejected"}}[10m])) > 2',
        for_="0m",
        severity="warning",
        summary=f"{_WHO} refuses weights, or cannot apply them",
        description="{{ $value | humanize }} publishes of the last ten minutes came to nothing.",
    ),
    Alert(
        alert="CormorantQueueFull",
        expr=f'collectorjob:cormorant_queue_wait:ratio_rate10m{{side="producer"}} > 0.8 {_RUNNING}',
        for_="10m",
        severity="info",
        summary=f"workers of {_WHO} wait for the learner",
        description="{{ $value | humanizePercentage }} of the time the queue is full: workers could do more.",
    ),
    Alert(
        alert="CormorantQueueStarved",
        expr=(
            f'collectorjob:cormorant_queue_wait:ratio_rate10m{{side="consumer"}} > 0.8'
            f" and on ({JOB}) (max by ({JOB}) (cormorant_consumers) > 0) {_RUNNING}"
        ),
        for_="10m",
        severity="info",
        summary=f"the learner of {_WHO} waits for batches",
        description="{{ $value | humanizePercentage }} of the time the queue is empty: more workers would help.",
    ),
    Alert(
        alert="CormorantPausedTooLong",
        expr=f"min by ({JOB}) (cormorant_paused) == 1",
        for_="4h",
        severity="info",
        summary=f"{_WHO} is paused for hours",
        description="Its pods hold their CPUs and devices; suspend gives them back.",
    ),
    Alert(
        alert="CormorantSinkLagging",
        expr=(
            f"max by ({JOB}) (cormorant_sink_lag_frames)"
            f" > on ({JOB}) (600 * collectorjob:cormorant_stepped_frames:rate2m > 0) {_RUNNING}"
        ),
        for_="10m",
        severity="warning",
        summary=f"the dataset of {_WHO} is not durable",
        description="{{ $value | humanize }} frames, more than ten minutes' worth, would be lost with their workers.",
    ),
    Alert(
        alert="CormorantReconcileErrors",
        expr="sum by (namespace, handler) (rate(cormorant_operator_reconcile_errors_total[10m])) > 0.05",
        for_="10m",
        severity="warning",
        summary="the operator cannot do what it decides",
        description="{{ $value | humanize }} errors a second in {{ $labels.handler }}; its log says which.",
    ),
    Alert(
        alert="CormorantNoLeader",
        # Without a single operator there is no series to compare.
        expr="max by (namespace) (cormorant_operator_leader) == 0 or absent(cormorant_operator_leader)",
        for_="5m",
        severity="warning",
        summary="no operator leads, or none is scraped",
        description="Jobs go on, and nobody replaces pods or answers changes of jobs.",
    ),
    Alert(
        alert="CormorantHeadsSilent",
        expr='sum by (namespace) (cormorant_operator_heads{state="silent"}) >= 3 and '
        'sum by (namespace) (cormorant_operator_heads{state="silent"}) '
        "> 0.5 * sum by (namespace) (cormorant_operator_heads)",
        for_="5m",
        severity="warning",
        summary="most heads do not answer the operator",
        description="{{ $value }} heads are silent together: rather the operator's network than they. Jobs go on.",
    ),
    Alert(
        alert="CormorantJobFailed",
        expr='max by (job_namespace, collectorjob) (cormorant_operator_job_phase{phase="Failed"}) == 1',
        for_="0m",
        severity="warning",
        summary="{{ $labels.job_namespace }}/{{ $labels.collectorjob }} has failed",
        description="It does not go on by itself. kubectl describe collectorjob says why.",
    ),
)
