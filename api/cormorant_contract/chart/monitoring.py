"""Values of the chart about monitoring of jobs."""

from typing import Annotated

from pydantic import Field

from cormorant_contract.base import Contract, Flag, Text

Names = dict[str, Text]


class PrometheusRule(Contract):
    """Recording rules and alerts, for the Prometheus operator."""

    enabled: Flag = True
    """Makes one where the cluster has the kind PrometheusRule; `files/rules/cormorant.yaml` is the same as a plain
    file."""

    labels: Names = Field(default={})
    """Labels that the Prometheus chooses its rules by."""


class Dashboards(Contract):
    """Grafana dashboards, as ConfigMaps that Grafana's sidecar finds."""

    enabled: Flag = True
    """Makes one ConfigMap for each dashboard: fleet, job, operator."""

    labels: Names = Field(default={"grafana_dashboard": "1"})
    """Labels that the sidecar chooses ConfigMaps by."""

    annotations: Names = Field(default={})
    """Annotations of the ConfigMaps, such as the sidecar's folder."""

    namespace: Annotated[str, Field(strict=True, max_length=63, pattern="^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")] = ""
    """Where the ConfigMaps are; empty: the release's namespace. A sidecar may look in its own namespace only."""
