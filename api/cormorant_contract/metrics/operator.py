"""Metrics of the operator, about itself and its jobs."""

from cormorant_contract.metrics.labels import API_METHOD, CODE, HANDLER, HEARD, JOB, JOB_NAMESPACE, JOB_PHASE, QUEUE
from cormorant_contract.metrics.metric import Kind, Label, Metric

_RECONCILES_S = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


def _of_operator(name: str, kind: Kind, help_: str, *labels: Label, buckets: tuple[float, ...] = ()) -> Metric:
    return Metric(name=f"cormorant_operator_{name}", kind=kind, help=help_, labels=labels, buckets=buckets)


LEADER = _of_operator("leader", "gauge", "Whether this operator leads.")
JOBS = _of_operator("jobs", "gauge", "CollectorJobs that this operator watches.")
JOB_PHASE_METRIC = _of_operator(
    "job_phase", "gauge", "1 for the phase that each job is in.", JOB_NAMESPACE, JOB, JOB_PHASE
)
JOB_WORKER_RESTARTS = _of_operator(
    "job_worker_restarts", "gauge", "Worker pods replaced so far, from the job's status.", JOB_NAMESPACE, JOB
)
JOB_HEAD_RESTARTS = _of_operator(
    "job_head_restarts", "gauge", "Heads replaced so far, from the job's status.", JOB_NAMESPACE, JOB
)
HEADS = _of_operator("heads", "gauge", "Heads by their last answer to the operator.", HEARD)
RECONCILE = _of_operator(
    "reconcile_duration_seconds", "histogram", "Duration of one reconcile attempt.", HANDLER, buckets=_RECONCILES_S
)
RECONCILE_ERRORS = _of_operator(
    "reconcile_errors_total", "counter", "Reconcile attempts that failed and will be retried.", HANDLER
)
QUEUE_DEPTH = _of_operator("workqueue_depth", "gauge", "Jobs that are due but not processed yet.", QUEUE)
QUEUE_WAIT = _of_operator("workqueue_longest_wait_seconds", "gauge", "Longest delay of a reconcile in the last minute.")
LOST_NAMESPACES = _of_operator(
    "lost_namespaces", "gauge", "Namespaces that the operator may not list; their jobs are not touched."
)
API_REQUESTS = _of_operator(
    "api_requests_total", "counter", "Requests to the API server by status code.", API_METHOD, CODE
)

OPERATOR_METRICS = (
    LEADER, JOBS, JOB_PHASE_METRIC, JOB_WORKER_RESTARTS, JOB_HEAD_RESTARTS, HEADS, RECONCILE, RECONCILE_ERRORS,
    QUEUE_DEPTH, QUEUE_WAIT, LOST_NAMESPACES, API_REQUESTS,
)  # fmt: skip
