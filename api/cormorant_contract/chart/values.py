"""Values of the Helm chart. The chart's values.yaml, its schema and the README's table are generated from here."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import (
    OPTIONAL_LABEL_PATTERN,
    OPTIONAL_NAME_PATTERN,
    Contract,
    Flag,
    Label,
    Text,
    Whole,
)

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
OptionalRepository = Annotated[str, Field(strict=True, max_length=255, pattern=f"^({REPOSITORY_PATTERN[1:-1]})?$")]
Tag = Annotated[str, Field(strict=True, max_length=128, pattern=TAG_PATTERN)]
Digest = Annotated[str, Field(strict=True, pattern=DIGEST_PATTERN)]
Cidr = Annotated[str, Field(strict=True, max_length=64, pattern=CIDR_PATTERN)]
Port = Annotated[Whole, Field(ge=1, le=65535)]
Names = dict[str, Text]
"""String maps with keys that users choose: labels, annotations, a node selector."""
Quantity = Annotated[str, Field(strict=True, pattern=QUANTITY_PATTERN)] | Annotated[float, Field(strict=True, ge=0)]
Quantities = dict[str, Quantity]
"""Amounts of resources as Kubernetes writes them: `"500m"`, `512Mi`, `2`."""


class OperatorImage(Contract):
    """Image of the operator itself."""

    repository: Repository = "ghcr.io/example/cormorant-operator"
    """Repository of the image, without a tag."""

    tag: Tag = ""
    """Tag (default: the chart's appVersion)."""

    digest: Digest = ""
    """Digest `sha256:...`; overrides the tag."""

    pull_policy: PullPolicy = "IfNotPresent"
    """Image pull policy."""


class JobImage(OperatorImage):
    """Image of heads and workers for jobs that do not set spec.image; with EnvPool, Ray and PyTorch without CUDA."""

    repository: Repository = "ghcr.io/example/cormorant-cpu"
    """Repository of the image, without a tag."""


class CudaImage(Contract):
    """Image of workers in groups with `device: gpu`, for the same jobs."""

    repository: OptionalRepository = ""
    """Repository of the image (default: that of `jobs.image` without a trailing `-cpu`)."""

    tag: Tag = ""
    """Tag (default: that of `jobs.image`)."""

    digest: Digest = ""
    """Digest `sha256:...`; overrides the tag."""


class JobNetworkPolicy(Contract):
    """One NetworkPolicy per job: its pods reach each other; others reach ports 8000 and 8001 only."""

    enabled: Flag = False
    """Creates the policies. Turning it off leaves existing policies with their jobs."""

    from_cidrs: tuple[Cidr, ...] = ()
    """CIDRs outside the cluster that may reach the API and metrics ports, such as `10.0.0.0/8`. Pods in the
    cluster always may."""


class JobTls(Contract):
    """What the operator needs for jobs with `spec.head.tls`."""

    ca_bundle: str = ""
    """PEM certificates of the authorities that sign heads' certificates; the operator also trusts those of its image.
    Without them it leaves such jobs alone, `Progressing=Unknown/CertificateRefused`."""

    cert_manager: Flag = False
    """Gives the operator the right to make Certificates of cert-manager, for jobs with `head.tls.certManager`."""


class Jobs(Contract):
    """Defaults for all jobs of this operator."""

    image: JobImage = JobImage()
    cuda_image: CudaImage = CudaImage()
    architectures: tuple[Label, ...] = ("amd64",)
    """CPU architectures of these images (label kubernetes.io/arch). Empty: jobs without spec.image run on any node."""

    image_pull_secrets: tuple[Name, ...] = ()
    """Names of image pull Secrets; they must exist in each job's namespace."""

    image_volumes: Literal["auto", "always", "never"] = "auto"
    """Whether `spec.code.image` is mounted as an image volume; otherwise an init container copies it. `auto`: from
    Kubernetes 1.35 on, which has the feature gate ImageVolume on by default."""

    network_policy: JobNetworkPolicy = JobNetworkPolicy()
    kueue: Flag = False
    """Gives the operator rights to Kueue's Workloads, for jobs with the label `kueue.x-k8s.io/queue-name`."""

    tls: JobTls = JobTls()
    poll_seconds: Annotated[Whole, Field(ge=1, le=3600)] = 15
    """Seconds between two polls of a running head."""


class ApiRequests(Contract):
    """Rate limit of requests to the API server. Pods go first, then conditions, then counters, which are written less
    often the more jobs there are.
    """

    per_second: Annotated[Whole, Field(ge=1, le=10000)] = 50
    """Sustained requests per second."""

    burst: Annotated[Whole, Field(ge=1, le=10000)] = 100
    """Burst of requests after an idle period."""


class Key(Contract):
    """The key that the tokens of all jobs are derived from."""

    existing_secret: OptionalName = ""
    """Name of a Secret whose entry `key` has at least 32 characters. Empty: the chart creates one and
    keeps it. Required where charts are rendered without a cluster (`helm template`, Argo CD), because the
    chart cannot look up its own."""


class Crd(Contract):
    """The CustomResourceDefinition of CollectorJob."""

    install: Flag = True
    """Installs the CRD and upgrades it with the chart. Turn it off if another tool manages the CRD."""

    keep: Flag = True
    """Keeps the CRD, and with it every job, when the chart is uninstalled. Off: both are deleted."""


class Rbac(Contract):
    """RBAC roles."""

    create: Flag = True
    """Grants the operator its permissions: in all namespaces, or in watchNamespaces only."""

    user_roles: Flag = True
    """Adds collectorjobs to the cluster roles `view` and `edit`."""


class ServiceAccount(Contract):
    """ServiceAccount of the operator."""

    create: Flag = True
    """Creates the ServiceAccount."""

    name: OptionalName = ""
    """Name of the ServiceAccount. Empty: the release's name, or `default` if it is not created."""

    annotations: Names = Field(default={})
    """Annotations of the ServiceAccount."""


class Resources(Contract):
    """Resources of the operator's container."""

    requests: Quantities = Field(default={"cpu": "100m", "memory": "128Mi"})
    """Resource requests."""

    limits: Quantities = Field(default={"memory": "512Mi"})
    """Resource limits."""


class Toleration(Contract):
    """A toleration of the operator's pods."""

    key: Text = ""
    """Key of the taint; empty: all keys."""

    operator: Literal["Exists", "Equal"] = "Equal"
    """Whether the value must be equal or any value matches."""

    value: Text = ""
    """Value of the taint."""

    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint; empty: all effects."""

    toleration_seconds: Annotated[Whole, Field(ge=0)] | None = None
    """Seconds that the pods stay under NoExecute; unset: indefinitely."""


class TopologySpread(Contract):
    """Topology spread constraints of the replicas."""

    topology_key: Text
    """Node label that defines the topology domains."""

    max_skew: Annotated[Whole, Field(ge=1)] = 1
    """Largest difference in replicas between two domains."""

    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"
    """What to do if the constraint cannot be met."""


class PodDisruptionBudget(Contract):
    """PodDisruptionBudget of the operator."""

    enabled: Flag = True
    """Creates one if there is more than one replica."""

    max_unavailable: Annotated[Whole, Field(ge=1)] = 1
    """Replicas that may be evicted at the same time."""


class NetworkPolicy(Contract):
    """NetworkPolicy of the operator: egress to DNS, the API server and heads; ingress from scrapers only."""

    enabled: Flag = False
    """Creates one. Off by default, because the API server's port differs between clusters."""

    api_server_ports: Annotated[tuple[Port, ...], Field(min_length=1)] = (443, 6443)
    """Ports of the API server, before and behind its Service."""


class PodMonitor(Contract):
    """PodMonitor for the operator and its jobs (Prometheus operator)."""

    enabled: Flag = True
    """Creates one if the cluster has the kind PodMonitor."""

    jobs: Flag = True
    """Creates another one for heads and workers, in every watched namespace."""

    interval: Annotated[str, Field(strict=True, pattern=DURATION_PATTERN)] = "30s"
    """Scrape interval."""

    labels: Names = Field(default={})
    """Labels that your Prometheus selects PodMonitors by."""


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

    namespace: Annotated[str, Field(strict=True, max_length=63, pattern=OPTIONAL_LABEL_PATTERN)] = ""
    """Namespace of the ConfigMaps (default: the release's). Some sidecars search only their own namespace."""


class Values(Contract):
    """Values of the chart."""

    image: OperatorImage = OperatorImage()
    image_pull_secrets: tuple[Name, ...] = ()
    """Names of image pull Secrets of the operator, in the release's namespace."""

    replicas: Annotated[Whole, Field(ge=0, le=10)] = 1
    """Number of operators. One leads, elected by a Lease; another takes over within seconds if it is lost."""

    watch_namespaces: tuple[Label, ...] = ()
    """Namespaces to watch; they must exist. Empty: all namespaces. With names the operator gets no cluster-wide
    permissions."""

    job_selector: Annotated[str, Field(strict=True, max_length=1024, pattern=SELECTOR_PATTERN)] = ""
    """Label selector of the jobs to manage, such as `team=a` or `team notin (a, b)`. Empty: all jobs. Several
    releases with disjoint selectors share the work: docs/explanation/scale.md."""

    jobs: Jobs = Jobs()
    api_requests: ApiRequests = ApiRequests()
    key: Key = Key()
    crd: Crd = Crd()
    rbac: Rbac = Rbac()
    service_account: ServiceAccount = ServiceAccount()
    resources: Resources = Resources()
    node_selector: Names = Field(default={"kubernetes.io/os": "linux"})
    """Node selector of the operator's pods."""

    fixed_user: Literal["auto", "always", "never"] = "auto"
    """Whether pods of the operator and of jobs run as user 65532. `auto`: yes, except on OpenShift, which assigns
    user IDs per namespace and rejects others."""

    tolerations: tuple[Toleration, ...] = ()
    """Tolerations of the operator's pods."""

    topology_spread: tuple[TopologySpread, ...] = (TopologySpread(topology_key="kubernetes.io/hostname"),)
    """Topology spread constraints of the replicas."""

    priority_class_name: OptionalName = ""
    """PriorityClass of the operator's pods."""

    pod_labels: Names = Field(default={})
    """Additional labels of the operator's pods."""

    pod_annotations: Names = Field(default={})
    """Additional annotations of the operator's pods."""

    pod_disruption_budget: PodDisruptionBudget = PodDisruptionBudget()
    network_policy: NetworkPolicy = NetworkPolicy()
    pod_monitor: PodMonitor = PodMonitor()
    prometheus_rule: PrometheusRule = PrometheusRule()
    dashboards: Dashboards = Dashboards()
