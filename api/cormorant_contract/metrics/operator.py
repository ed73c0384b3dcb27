"""Metrics of the operator, about itself and its jobs."""

from cormorant_contract.metrics.labels import (
    API_METHOD,
    CODE,
    HANDLER,
    HEARD,
    JOB,
    JOB_NAMESPACE,
    JOB_PHASE,
    QUEUE,
    MetricList,
)

_RECONCILES_S = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)

_METRICS = MetricList("cormorant_operator_")
LEADER = _METRICS.gauge("leader", "Whether this operator leads.")
JOBS = _METRICS.gauge("jobs", "CollectorJobs that this operator watches.")
JOB_PHASE_METRIC = _METRICS.gauge("job_phase", "1 for the phase that each job is in.", JOB_NAMESPACE, JOB, JOB_PHASE)
JOB_WORKER_RESTARTS = _METRICS.gauge(
    "job_worker_restarts", "Worker pods replaced so far, from the job's status.", JOB_NAMESPACE, JOB
)
JOB_HEAD_RESTARTS = _METRICS.gauge(
    "job_head_restarts", "Heads replaced so far, from the job's status.", JOB_NAMESPACE, JOB
)
HEADS = _METRICS.gauge("heads", "Heads by their last answer to the operator.", HEARD)
RECONCILE = _METRICS.histogram(
    "reconcile_duration_seconds", "Duration of one reconcile attempt.", HANDLER, buckets=_RECONCILES_S
)
RECONCILE_ERRORS = _METRICS.counter(
    "reconcile_errors_total", "Reconcile attempts that failed and will be retried.", HANDLER
)
QUEUE_DEPTH = _METRICS.gauge("workqueue_depth", "Jobs that are due but not processed yet.", QUEUE)
QUEUE_WAIT = _METRICS.gauge("workqueue_longest_wait_seconds", "Longest delay of a reconcile in the last minute.")
LOST_NAMESPACES = _METRICS.gauge(
    "lost_namespaces", "Namespaces that the operator may not list; their jobs are not touched."
)
API_REQUESTS = _METRICS.counter("api_requests_total", "Requests to the API server by status code.", API_METHOD, CODE)

OPERATOR_METRICS = tuple(_METRICS)
