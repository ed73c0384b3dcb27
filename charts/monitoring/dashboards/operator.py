"""The operator dashboard: does it keep up, and in what phase are its jobs?"""

from charts.monitoring.dashboards.sheet import Panel, Section, choice, sheet
from grafana_foundation_sdk.builders.dashboard import Dashboard

_HERE = 'namespace=~"$namespace"'
_JOBS = f'{_HERE}, job_namespace=~"$job_namespace", collectorjob=~"$collectorjob"'
_WHO = "{{job_namespace}}/{{collectorjob}}"


def build() -> Dashboard:
    return sheet(
        uid="cormorant-operator",
        title="Cormorant / Operator",
        description="The operator: jobs by phase, reconciles, work queues, API server responses.",
        variables=(
            choice("namespace", "Namespace of the operator", "label_values(cormorant_operator_leader, namespace)"),
            choice("job_namespace", "Namespace of jobs", "label_values(cormorant_operator_job_phase, job_namespace)"),
            choice(
                "collectorjob",
                "Job",
                'label_values(cormorant_operator_job_phase{job_namespace=~"$job_namespace"}, collectorjob)',
            ),
        ),
        sections=(
            Section(
                title="Jobs",
                panels=(
                    Panel(
                        title="Leaders",
                        description="Operators that hold the lease; should be 1.",
                        unit="none",
                        queries={"leaders": f"sum(cormorant_operator_leader{{{_HERE}}})"},
                        width=6,
                        is_stat=True,
                    ),
                    Panel(
                        title="Jobs",
                        description="Existing CollectorJobs.",
                        unit="none",
                        queries={"jobs": f"max(cormorant_operator_jobs{{{_HERE}}})"},
                        width=6,
                        is_stat=True,
                    ),
                    Panel(
                        title="Jobs by phase",
                        description="Jobs by status.phase.",
                        unit="none",
                        queries={"{{phase}}": f"sum by (phase) (cormorant_operator_job_phase{{{_JOBS}}})"},
                        width=12,
                        is_stacked=True,
                    ),
                    Panel(
                        title="Heads replaced",
                        description="Heads replaced so far, from the job's status.",
                        unit="none",
                        queries={
                            _WHO: "max by (job_namespace, collectorjob) "
                            f"(cormorant_operator_job_head_restarts{{{_JOBS}}})"
                        },
                        width=12,
                    ),
                    Panel(
                        title="Worker pods replaced",
                        description="Worker pods replaced so far, from the job's status.",
                        unit="none",
                        queries={
                            _WHO: "max by (job_namespace, collectorjob) "
                            f"(cormorant_operator_job_worker_restarts{{{_JOBS}}})"
                        },
                        width=12,
                    ),
                ),
            ),
            Section(
                title="Work",
                panels=(
                    Panel(
                        title="Reconciles per second",
                        description="By handler. reconcile: a full reconcile. poll: a request to a head.",
                        unit="suffix: reconciles/s",
                        queries={
                            "{{handler}}": "sum by (handler) "
                            f"(rate(cormorant_operator_reconcile_duration_seconds_count{{{_HERE}}}[$__rate_interval]))"
                        },
                    ),
                    Panel(
                        title="Reconcile duration (p99)",
                        description="99th percentile, by handler.",
                        unit="s",
                        queries={
                            "{{handler}}": "histogram_quantile(0.99, sum by (le, handler) "
                            f"(rate(cormorant_operator_reconcile_duration_seconds_bucket{{{_HERE}}}[$__rate_interval])))"
                        },
                    ),
                    Panel(
                        title="Errors per second",
                        description="Reconcile attempts per second that failed and will be retried.",
                        unit="suffix: errors/s",
                        queries={
                            "{{handler}}": "sum by (handler) "
                            f"(rate(cormorant_operator_reconcile_errors_total{{{_HERE}}}[$__rate_interval]))"
                        },
                    ),
                    Panel(
                        title="Queue depth",
                        description="Jobs that are due and waiting, by queue.",
                        unit="none",
                        queries={"{{queue}}": f"sum by (queue) (cormorant_operator_workqueue_depth{{{_HERE}}})"},
                    ),
                    Panel(
                        title="Longest wait",
                        description="Longest time that a due job waited for its reconcile within the last minute.",
                        unit="s",
                        queries={"at most": f"max(cormorant_operator_workqueue_longest_wait_seconds{{{_HERE}}})"},
                    ),
                    Panel(
                        title="API server responses",
                        description="Responses per second by status code; 0: no response.",
                        unit="reqps",
                        queries={
                            "{{method}} {{code}}": "sum by (method, code) "
                            f"(rate(cormorant_operator_api_requests_total{{{_HERE}}}[$__rate_interval]))"
                        },
                    ),
                ),
            ),
        ),
    )
