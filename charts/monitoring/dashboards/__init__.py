"""Grafana dashboards: a fleet of jobs, one job, the operator."""

from charts.monitoring.dashboards import fleet, job, operator
from charts.monitoring.dashboards.sheet import text_of


def dashboards() -> dict[str, str]:
    """JSON of each, by the name of its file."""
    return {
        "cormorant-fleet": text_of(fleet.build()),
        "cormorant-job": text_of(job.build()),
        "cormorant-operator": text_of(operator.build()),
    }
