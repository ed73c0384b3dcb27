"""What the pods and the Secret of a job are called: the operator makes them, the command line finds them."""

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
"""Annotation: failures that this slot ever had before this pod."""

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
"""Labels of a job: the LocalQueue of Kueue that it waits in, and its WorkloadPriorityClass."""

HEAD, WORKER = "head", "worker"
"""Roles; also the names of the containers."""

API_PORT, DATA_PORT = 8000, 8001
"""Ports of a head: control plane and bulk data."""

CODE_FOLDER = "/etc/cormorant/code"
CODE_ARCHIVE = "packages.zip"
"""File of spec.code's ConfigMap whose packages are importable; a ConfigMap has no folders."""


def api_service(job: str) -> str:
    """Service that users reach the control plane by."""
    return f"{job}-api"


def api_host(job: str, namespace: str) -> str:
    """The name in the cluster that users reach the control plane by, and that its certificate has."""
    return f"{api_service(job)}.{namespace}.svc"


def tls_secret(job: str) -> str:
    """Secret of the certificate that cert-manager makes for the head."""
    return f"{job}-tls"


def tokens_secret(job: str) -> str:
    """Secret of the job's tokens: one key a role."""
    return f"{job}-tokens"


def code_config_map(job: str, digest: str) -> str:
    """ConfigMap of the code that was submitted with a job; at most 54 characters."""
    return f"{job}-code-{digest}"
