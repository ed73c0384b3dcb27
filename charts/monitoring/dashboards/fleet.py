"""All jobs at a glance: which collect, how fast, which have problems."""

from charts.monitoring.dashboards.sheet import Panel, Section, choice, sheet
from grafana_foundation_sdk.builders.dashboard import Dashboard

_JOBS = 'namespace=~"$namespace", collectorjob=~"$collectorjob"'
_BY = "namespace, collectorjob"
_WHO = "{{namespace}}/{{collectorjob}}"


def build() -> Dashboard:
    return sheet(
        uid="cormorant-fleet",
        title="Cormorant / Fleet",
        description="All scraped CollectorJobs: frames, workers, weights, failures.",
        variables=(
            choice("namespace", "Namespace", "label_values(cormorant_frames_total, namespace)"),
            choice(
                "collectorjob", "Job", 'label_values(cormorant_frames_total{namespace=~"$namespace"}, collectorjob)'
            ),
        ),
        sections=(
            Section(
                title="Now",
                panels=(
                    Panel(
                        title="Jobs",
                        description="Scraped heads by state.",
                        unit="none",
                        queries={"{{state}}": f"sum by (state) (cormorant_head_state{{{_JOBS}}})"},
                        width=8,
                        is_stat=True,
                    ),
                    Panel(
                        title="Frames per second",
                        description="Total of all jobs.",
                        unit="suffix: frames/s",
                        queries={"all": f"sum(cormorant_frames_per_second{{{_JOBS}}})"},
                        is_stat=True,
                    ),
                    Panel(
                        title="Workers",
                        description="Ready workers of all jobs.",
                        unit="none",
                        queries={"ready": f'sum(cormorant_workers{{{_JOBS}, state="ready"}})'},
                        is_stat=True,
                    ),
                ),
            ),
            Section(
                title="Jobs",
                panels=(
                    Panel(
                        title="Frames per second by job",
                        description="Frames stepped per second.",
                        unit="suffix: frames/s",
                        leads_to_job=True,
                        queries={
                            _WHO: f"sum by ({_BY}) (rate(cormorant_stepped_frames_total{{{_JOBS}}}[$__rate_interval]))"
                        },
                        width=12,
                        is_stacked=True,
                    ),
                    Panel(
                        title="Progress",
                        description="Collected share of totalFrames, for jobs that set it.",
                        unit="percentunit",
                        leads_to_job=True,
                        queries={
                            _WHO: f"max by ({_BY}) (cormorant_frames_total{{{_JOBS}}})"
                            f" / max by ({_BY}) (cormorant_target_frames{{{_JOBS}}})"
                        },
                        width=12,
                        most=1.0,
                    ),
                    Panel(
                        title="Episode return",
                        description="Mean of the last 100 episodes.",
                        unit="none",
                        leads_to_job=True,
                        queries={_WHO: f"avg by ({_BY}) (cormorant_recent_episode_return{{{_JOBS}}})"},
                    ),
                    Panel(
                        title="Share of worker time spent stepping",
                        description="Share of worker time spent in environments and the policy.",
                        unit="percentunit",
                        leads_to_job=True,
                        queries={
                            _WHO: f"sum by ({_BY}) (rate(cormorant_phase_seconds_total{{{_JOBS}, "
                            'phase=~"env|inference|transfer"}[$__rate_interval]))'
                            f" / sum by ({_BY}) (rate(cormorant_phase_seconds_total{{{_JOBS}}}[$__rate_interval]))"
                        },
                        most=1.0,
                    ),
                    Panel(
                        title="Policy lag",
                        description="Published version minus the oldest version in use by a worker.",
                        unit="none",
                        leads_to_job=True,
                        queries={
                            _WHO: f"max by ({_BY}) (cormorant_policy_version_published{{{_JOBS}}})"
                            f" - min by ({_BY}) (cormorant_policy_version{{{_JOBS}}})"
                        },
                    ),
                ),
            ),
            Section(
                title="Problems",
                panels=(
                    Panel(
                        title="Workers missing",
                        description="Desired workers that are not ready.",
                        unit="none",
                        leads_to_job=True,
                        queries={
                            _WHO: f'sum by ({_BY}) (cormorant_workers{{{_JOBS}, state="desired"}})'
                            f' - sum by ({_BY}) (cormorant_workers{{{_JOBS}, state="ready"}})'
                        },
                    ),
                    Panel(
                        title="Workers replaced",
                        description="Workers replaced in the interval.",
                        unit="none",
                        leads_to_job=True,
                        queries={
                            _WHO: f"sum by ({_BY}) "
                            f"(increase(cormorant_worker_restarts_total{{{_JOBS}}}[$__rate_interval]))"
                        },
                    ),
                    Panel(
                        title="Frames dropped",
                        description="Frames per second that were stepped but not delivered.",
                        unit="suffix: frames/s",
                        leads_to_job=True,
                        queries={
                            _WHO: f"sum by ({_BY}) (rate(cormorant_frames_dropped_total{{{_JOBS}}}[$__rate_interval]))"
                        },
                    ),
                ),
            ),
        ),
    )
