"""Values of the chart about monitoring of jobs."""

from typing import Annotated

from pydantic import Field

from cormorant_contract.base import Contract, Flag, Text

Names = dict[str, Text]


class PrometheusRule(Contract):
    """Recording rules and alerts (Prometheus operator)."""

    enabled: Flag = True
    """Creates one if the cluster has the kind PrometheusRule. `files/rules/cormorant.yaml` is the same as a plain rule
    file."""

    labels: Names = Field(default={})
    """Labels that your Prometheus selects rules by."""


class Dashboards(Contract):
    """Grafana dashboards as ConfigMaps for Grafana's sidecar."""

    enabled: Flag = True
    """Creates one ConfigMap per dashboard: fleet, job, operator."""

    labels: Names = Field(default={"grafana_dashboard": "1"})
    """Labels that the sidecar selects ConfigMaps by."""

    annotations: Names = Field(default={})
    """Annotations of the ConfigMaps, such as the folder for the sidecar."""

    namespace: Annotated[str, Field(strict=True, max_length=63, pattern="^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")] = ""
    """Namespace of the ConfigMaps (default: the release's). Some sidecars search only their own namespace."""
