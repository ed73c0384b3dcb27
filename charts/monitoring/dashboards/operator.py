"""The operator: whether it keeps up, and what it says of jobs."""

from charts.monitoring.dashboards.sheet import Panel, Section, choice, sheet
from grafana_foundation_sdk.builders.dashboard import Dashboard

_HERE = 'namespace=~"$namespace"'
_JOBS = f'{_HERE}, job_namespace=~"$job_namespace", collectorjob=~"$collectorjob"'
_WHO = "{{job_namespace}}/{{collectorjob}}"


def build() -> Dashboard:
    return sheet(
        uid="cormorant-operator",
        title="Cormorant / Operator",
        description="The operator: jobs by phase, reconciles, its queue, the API server's answers.",
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
                        description="Operators that lead: one.",
                        unit="none",
                        queries={"leaders": f"sum(cormorant_operator_leader{{{_HERE}}})"},
                        width=6,
                        is_stat=True,
                    ),
                    Panel(
                        title="Jobs",
                        description="CollectorJobs that exist.",
                        unit="none",
                        queries={"jobs": f"max(cormorant_operator_jobs{{{_HERE}}})"},
                        width=6,
                        is_stat=True,
                    ),
                    Panel(
                        title="Jobs by phase",
                        description="As status.phase says.",
                        unit="none",
                        queries={"{{phase}}": f"sum by (phase) (cormorant_operator_job_phase{{{_JOBS}}})"},
                        width=12,
                        is_stacked=True,
                    ),
                    Panel(
                        title="Heads replaced",
                        description="So far, as the status says.",
                        unit="none",
                        queries={
                            _WHO: "max by (job_namespace, collectorjob) "
                            f"(cormorant_operator_job_head_restarts{{{_JOBS}}})"
                        },
                        width=12,
                    ),
                    Panel(
                        title="Worker pods replaced",
                        description="So far, as the status says.",
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
                        description="Per second. reconcile: a decision and what follows. poll: a question to a head.",
                        unit="suffix: reconciles/s",
                        queries={
                            "{{handler}}": "sum by (handler) "
                            f"(rate(cormorant_operator_reconcile_duration_seconds_count{{{_HERE}}}[$__rate_interval]))"
                        },
                    ),
                    Panel(
                        title="How long they take",
                        description="One in a hundred takes longer.",
                        unit="s",
                        queries={
                            "{{handler}}": "histogram_quantile(0.99, sum by (le, handler) "
                            f"(rate(cormorant_operator_reconcile_duration_seconds_bucket{{{_HERE}}}[$__rate_interval])))"
                        },
                    ),
                    Panel(
                        title="Errors per second",
                        description="Looks per second that ended with an error, and are repeated.",
                        unit="suffix: errors/s",
                        queries={
                            "{{handler}}": "sum by (handler) "
                            f"(rate(cormorant_operator_reconcile_errors_total{{{_HERE}}}[$__rate_interval]))"
                        },
                    ),
                    Panel(
                        title="Waiting jobs",
                        description="Due and not looked at yet.",
                        unit="none",
                        queries={"{{queue}}": f"sum by (queue) (cormorant_operator_workqueue_depth{{{_HERE}}})"},
                    ),
                    Panel(
                        title="Longest wait",
                        description="How late a job was looked at, at most, since the operator began.",
                        unit="s",
                        queries={"at most": f"max(cormorant_operator_workqueue_longest_wait_seconds{{{_HERE}}})"},
                    ),
                    Panel(
                        title="Answers of the API server",
                        description="Per second, by status; 0: it did not answer.",
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
