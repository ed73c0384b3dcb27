"""Metrics of the operator, about itself and its jobs."""

from cormorant_contract.metrics import labels as by
from cormorant_contract.metrics.labels import MetricList

_RECONCILES_S = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)

_METRICS = MetricList("cormorant_operator_")
LEADER = _METRICS.gauge("leader", "Whether this operator leads.")
JOBS = _METRICS.gauge("jobs", "CollectorJobs that this operator watches.")
JOB_PHASE_METRIC = _METRICS.gauge(
    "job_phase", "1 for the phase that each job is in.", by.JOB_NAMESPACE, by.JOB, by.JOB_PHASE
)
JOB_WORKER_RESTARTS = _METRICS.gauge(
    "job_worker_restarts", "Worker pods replaced so far, from the job's status.", by.JOB_NAMESPACE, by.JOB
)
JOB_HEAD_RESTARTS = _METRICS.gauge(
    "job_head_restarts", "Heads replaced so far, from the job's status.", by.JOB_NAMESPACE, by.JOB
)
HEADS = _METRICS.gauge("heads", "Heads by their last answer to the operator.", by.HEARD)
RECONCILE = _METRICS.histogram(
    "reconcile_duration_seconds", "Duration of one reconcile attempt.", by.HANDLER, buckets=_RECONCILES_S
)
RECONCILE_ERRORS = _METRICS.counter(
    "reconcile_errors_total", "Reconcile attempts that failed and will be retried.", by.HANDLER
)
QUEUE_DEPTH = _METRICS.gauge("workqueue_depth", "Jobs that are due but not processed yet.", by.QUEUE)
QUEUE_WAIT = _METRICS.gauge("workqueue_longest_wait_seconds", "How long the first due reconcile has waited.")
LOST_NAMESPACES = _METRICS.gauge(
    "lost_namespaces", "Namespaces that the operator may not list; their jobs are not touched."
)
API_REQUESTS = _METRICS.counter(
    "api_requests_total", "Requests to the API server by status code.", by.API_METHOD, by.CODE
)

OPERATOR_METRICS = tuple(_METRICS)
