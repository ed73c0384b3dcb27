"""Names of a job's pods and Secrets, and their paths in the API server: the operator creates them, the command line
finds them.
"""

from urllib.parse import quote

PREFIX = "cormorant.dev"

JOB = f"{PREFIX}/collectorjob"
"""Label of everything that belongs to a job: the job's name."""
JOB_UID = f"{PREFIX}/job-uid"
ROLE = f"{PREFIX}/role"
GROUP = f"{PREFIX}/group"
INDEX = f"{PREFIX}/index"
ATTEMPT = f"{PREFIX}/attempt"
EPOCH = f"{PREFIX}/epoch"
RESTARTS = f"{PREFIX}/restarts"
"""Annotation: number of failures in this slot before this pod."""

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
"""Labels of a job: Kueue's LocalQueue that it waits in, and its WorkloadPriorityClass."""

HEAD, WORKER = "head", "worker"
"""Roles; also the names of the containers."""

API_PORT, DATA_PORT = 8000, 8001
"""Ports of a head: control plane and bulk data."""

CODE_FOLDER = "/etc/cormorant/code"
CODE_ARCHIVE = "packages.zip"
"""File of spec.code's ConfigMap whose packages are importable; a ConfigMap has no folders."""


def api_service(job: str) -> str:
    """Service through which users reach the control plane."""
    return f"{job}-api"


def api_host(job: str, namespace: str) -> str:
    """Name of the control plane in the cluster, which its certificate must contain."""
    return f"{api_service(job)}.{namespace}.svc"


def tls_secret(job: str) -> str:
    """Secret of the certificate that cert-manager makes for the head."""
    return f"{job}-tls"


def tokens_secret(job: str) -> str:
    """Secret of the job's tokens: one key per role."""
    return f"{job}-tokens"


def code_config_map(job: str, digest: str) -> str:
    """ConfigMap of the code that was submitted with a job; at most 54 characters."""
    return f"{job}-code-{digest}"


_APIS = {
    # API of a kind, its plural
    "CollectorJob": ("apis/cormorant.dev/v1alpha1", "collectorjobs"),
    "Pod": ("api/v1", "pods"),
    "Node": ("api/v1", "nodes"),
    "Namespace": ("api/v1", "namespaces"),
    "Service": ("api/v1", "services"),
    "ConfigMap": ("api/v1", "configmaps"),
    "Secret": ("api/v1", "secrets"),
    "Event": ("api/v1", "events"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "PodGroup": ("apis/scheduling.k8s.io/v1beta1", "podgroups"),
    "Lease": ("apis/coordination.k8s.io/v1", "leases"),
    "CustomResourceDefinition": ("apis/apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "Certificate": ("apis/cert-manager.io/v1", "certificates"),
    "Workload": ("apis/kueue.x-k8s.io/v1beta2", "workloads"),
    "ResourceFlavor": ("apis/kueue.x-k8s.io/v1beta2", "resourceflavors"),
    "WorkloadPriorityClass": ("apis/kueue.x-k8s.io/v1beta2", "workloadpriorityclasses"),
}


def api_path(kind: str, namespace: str = "", name: str = "") -> str:
    """Path of an object, or of all objects of a kind, in the API server: `api/v1/namespaces/rl/pods/pong-head-1`."""
    api, plural = _APIS[kind]
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{api}{inside}/{plural}" + (f"/{quote(name, safe='')}" if name else "")
