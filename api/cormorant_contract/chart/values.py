"""What `helm install cormorant --set ...` may say. The chart's values.yaml, its schema and its table come from here."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import (
    OPTIONAL_NAME_PATTERN,
    Contract,
    Flag,
    Label,
    Text,
    Whole,
)
from cormorant_contract.chart.monitoring import Dashboards, PrometheusRule

NAME_PATTERN = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
DIGEST_PATTERN = "^(sha256:[a-f0-9]{64})?$"
TAG_PATTERN = "^([A-Za-z0-9_][A-Za-z0-9_.-]*)?$"
REPOSITORY_PATTERN = "^[a-z0-9][a-zA-Z0-9._:/-]*$"
DURATION_PATTERN = "^[0-9]+(ms|s|m|h)$"
QUANTITY_PATTERN = "^[0-9]+([.][0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
SELECTOR_PATTERN = "^[-A-Za-z0-9_./=!,() ]*$"
CIDR_PATTERN = "^[0-9a-fA-F.:]+/[0-9]{1,3}$"

PullPolicy = Literal["Always", "IfNotPresent", "Never"]
Name = Annotated[str, Field(strict=True, max_length=253, pattern=NAME_PATTERN)]
OptionalName = Annotated[str, Field(strict=True, max_length=253, pattern=OPTIONAL_NAME_PATTERN)]
Repository = Annotated[str, Field(strict=True, max_length=255, pattern=REPOSITORY_PATTERN)]
Tag = Annotated[str, Field(strict=True, max_length=128, pattern=TAG_PATTERN)]
Digest = Annotated[str, Field(strict=True, pattern=DIGEST_PATTERN)]
Cidr = Annotated[str, Field(strict=True, max_length=64, pattern=CIDR_PATTERN)]
Port = Annotated[Whole, Field(ge=1, le=65535)]
Names = dict[str, Text]
"""Keys that users choose, with a string each: labels, annotations, a node selector."""
Quantity = Annotated[str, Field(strict=True, pattern=QUANTITY_PATTERN)] | Annotated[float, Field(strict=True, ge=0)]
Quantities = dict[str, Quantity]
"""Amounts of resources as Kubernetes writes them: `"500m"`, `512Mi`, `2`."""


class OperatorImage(Contract):
    """Image of the operator itself."""

    repository: Repository = "ghcr.io/example/cormorant-operator"
    """Where it is pulled from, without a tag."""

    tag: Tag = ""
    """Tag; empty: the chart's appVersion."""

    digest: Digest = ""
    """`sha256:...`; stronger than the tag, and never moves."""

    pull_policy: PullPolicy = "IfNotPresent"
    """When a node pulls it."""


class JobImage(OperatorImage):
    """Image of heads and workers of jobs that name none: with PyTorch, EnvPool and Ray."""

    repository: Repository = "ghcr.io/example/cormorant"
    """Where it is pulled from, without a tag."""


class JobNetworkPolicy(Contract):
    """A NetworkPolicy for each job: its pods hear each other, and others by the ports 8000 and 8001 alone."""

    enabled: Flag = False
    """Makes them. One that is there stays with its job when this is turned off."""

    from_cidrs: tuple[Cidr, ...] = ()
    """Addresses outside the cluster that may reach the ports of the API and of metrics, like `10.0.0.0/8`; pods of the
    cluster always may."""


class Jobs(Contract):
    """What the operator gives all its jobs."""

    image: JobImage = JobImage()
    """Image of heads and workers of jobs that name none: with PyTorch, EnvPool and Ray."""

    architectures: tuple[Label, ...] = ("amd64",)
    """Architectures of this image, as nodes are labelled; none: jobs that name no image may run on any node."""

    image_pull_secrets: tuple[Name, ...] = ()
    """Names of pull Secrets; they must exist in each job's namespace."""

    network_policy: JobNetworkPolicy = JobNetworkPolicy()
    """A NetworkPolicy for each job: its pods hear each other, and others by the ports 8000 and 8001 alone."""

    poll_seconds: Annotated[Whole, Field(ge=1, le=3600)] = 15
    """Time between two looks at a head that runs."""


class ApiRequests(Contract):
    """The operator's budget of requests to the API server. Pods go first, then conditions, then counters: these are
    written the more rarely, the more jobs there are.
    """

    per_second: Annotated[Whole, Field(ge=1, le=10000)] = 50
    """Requests a second, on average."""

    burst: Annotated[Whole, Field(ge=1, le=10000)] = 100
    """Requests at once after a pause."""


class Key(Contract):
    """The key that all jobs' tokens are derived from."""

    existing_secret: OptionalName = ""
    """Name of a Secret whose entry `key` has at least 32 characters; empty: the chart makes one, once, and keeps it.
    Needed where charts are rendered without a cluster (`helm template`, Argo CD): there is nothing to look it up in."""


class Crd(Contract):
    """The CustomResourceDefinition of CollectorJob."""

    install: Flag = True
    """Installs it, and upgrades it with the chart; off where somebody else does."""

    keep: Flag = True
    """Uninstalling the chart leaves it, and with it every job. Off: both are deleted."""


class Rbac(Contract):
    """Who may do what."""

    create: Flag = True
    """Gives the operator its rights: in all namespaces, or in watchNamespaces only."""

    user_roles: Flag = True
    """Adds collectorjobs to the cluster's own roles `view` and `edit`."""


class ServiceAccount(Contract):
    """The operator's identity."""

    create: Flag = True
    """Makes it."""

    name: OptionalName = ""
    """Its name; empty: the release's, or `default` when it is not made."""

    annotations: Names = Field(default={})
    """Its annotations."""


class Resources(Contract):
    """What the operator's container asks for and may use."""

    requests: Quantities = Field(default={"cpu": "100m", "memory": "128Mi"})
    """What its node must have free."""

    limits: Quantities = Field(default={"memory": "512Mi"})
    """What it may not exceed."""


class Toleration(Contract):
    """A taint that the operator's pods may live with."""

    key: Text = ""
    """Key of the taint; empty: every one."""

    operator: Literal["Exists", "Equal"] = "Equal"
    """How the value is compared."""

    value: Text = ""
    """Value of the taint."""

    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint; empty: every one."""

    toleration_seconds: Annotated[Whole, Field(ge=0)] | None = None
    """How long, for NoExecute; unset: for ever."""


class TopologySpread(Contract):
    """How replicas are spread over nodes or zones."""

    topology_key: Text
    """Label of nodes that divides them."""

    max_skew: Annotated[Whole, Field(ge=1)] = 1
    """Most by which two parts may differ."""

    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"
    """What to do when it cannot be."""


class PodDisruptionBudget(Contract):
    """Protection against drains of several nodes at once."""

    enabled: Flag = True
    """Makes one, when there is more than one replica."""

    max_unavailable: Annotated[Whole, Field(ge=1)] = 1
    """Replicas that a drain may take at one time."""


class NetworkPolicy(Contract):
    """What the operator's pods may talk to: DNS, the API server and heads, and nobody but scrapers to them."""

    enabled: Flag = False
    """Makes one. Off by default, since the API server's port differs between clusters."""

    api_server_ports: Annotated[tuple[Port, ...], Field(min_length=1)] = (443, 6443)
    """Ports of the API server, before and behind its Service."""


class PodMonitor(Contract):
    """Scraping of the operator and of its jobs by the Prometheus operator."""

    enabled: Flag = True
    """Makes one where the cluster has the kind PodMonitor."""

    jobs: Flag = True
    """Makes another one of heads and workers, in every namespace that is looked after."""

    interval: Annotated[str, Field(strict=True, pattern=DURATION_PATTERN)] = "30s"
    """Time between two scrapes."""

    labels: Names = Field(default={})
    """Labels that the Prometheus chooses its PodMonitors by."""


class Values(Contract):
    """Every value of the chart."""

    image: OperatorImage = OperatorImage()
    """Image of the operator itself."""

    image_pull_secrets: tuple[Name, ...] = ()
    """Names of pull Secrets of the operator's image, in the release's namespace."""

    replicas: Annotated[Whole, Field(ge=0, le=10)] = 1
    """Operators. One works, chosen by a Lease; the others take over within seconds when it is lost."""

    watch_namespaces: tuple[Label, ...] = ()
    """Namespaces that are looked after, which must exist; none: all. With names the operator has no cluster-wide
    right."""

    job_selector: Annotated[str, Field(strict=True, max_length=1024, pattern=SELECTOR_PATTERN)] = ""
    """Label selector of the jobs that are looked after, like `team=a` or `team notin (a, b)`; empty: all. Several
    releases with selectors that exclude each other share the work: docs/explanation/scale.md."""

    jobs: Jobs = Jobs()
    """What the operator gives all its jobs."""

    api_requests: ApiRequests = ApiRequests()
    """The operator's budget of requests to the API server. Pods go first, then conditions, then counters: these are
    written the more rarely, the more jobs there are."""

    key: Key = Key()
    """The key that all jobs' tokens are derived from."""

    crd: Crd = Crd()
    """The CustomResourceDefinition of CollectorJob."""

    rbac: Rbac = Rbac()
    """Who may do what."""

    service_account: ServiceAccount = ServiceAccount()
    """The operator's identity."""

    resources: Resources = Resources()
    """What the operator's container asks for and may use."""

    node_selector: Names = Field(default={"kubernetes.io/os": "linux"})
    """Labels of nodes that the operator may run on."""

    fixed_user: Literal["auto", "always", "never"] = "auto"
    """Whether pods of the operator and of jobs run as user 65532. `auto`: but on OpenShift, which gives each namespace
    users of its own and refuses others."""

    tolerations: tuple[Toleration, ...] = ()
    """Taints that the operator's pods may live with."""

    topology_spread: tuple[TopologySpread, ...] = (TopologySpread(topology_key="kubernetes.io/hostname"),)
    """How replicas are spread over nodes or zones."""

    priority_class_name: OptionalName = ""
    """PriorityClass of the operator's pods."""

    pod_labels: Names = Field(default={})
    """More labels of the operator's pods."""

    pod_annotations: Names = Field(default={})
    """More annotations of the operator's pods."""

    pod_disruption_budget: PodDisruptionBudget = PodDisruptionBudget()
    """Protection against drains of several nodes at once."""

    network_policy: NetworkPolicy = NetworkPolicy()
    """What the operator's pods may talk to: DNS, the API server and heads, and nobody but scrapers to them."""

    pod_monitor: PodMonitor = PodMonitor()
    """Scraping of the operator and of its jobs by the Prometheus operator."""

    prometheus_rule: PrometheusRule = PrometheusRule()
    """Recording rules and alerts, for the Prometheus operator."""

    dashboards: Dashboards = Dashboards()
    """Grafana dashboards, as ConfigMaps that Grafana's sidecar finds."""
