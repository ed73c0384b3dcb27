"""Command lines and environments of head and worker pods.

Both start `python -m cormorant_worker.supervisor` as process 1 of a container that is never restarted.
docs/reference/pods.md describes it and its exit codes.
"""

from collections.abc import Mapping
from typing import Any

from cormorant_contract.children import API_PORT, CODE_FOLDER, DATA_PORT
from cormorant_operator import names

__all__ = ["API_PORT", "CODE_FOLDER", "DATA_PORT"]

TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes' default path of termination messages."""

GCS_PORT, WORKER_PORT = 6379, 8000

SCRAPE_ANNOTATIONS: Mapping[str, str] = {
    "prometheus.io/scrape": "true",
    "prometheus.io/port": str(WORKER_PORT),
    "prometheus.io/path": "/metrics",
}
"""Pod annotations for a Prometheus without PodMonitors; a pod template can override them."""

JOB_FILE = "/etc/cormorant/job/job.yaml"
TOKEN_FILE = "/etc/cormorant/tokens/tokens.json"
STATE_FOLDER = "/var/lib/cormorant"
TLS_FOLDER = "/etc/cormorant/tls"

_SUPERVISOR = ("python", "-m", "cormorant_worker.supervisor")
WORKER_COMMAND = (*_SUPERVISOR, "worker")
"""A worker's argument vector; workers differ only in their environment."""

_COMMON: Mapping[str, str] = {
    "HOME": "/tmp",
    # A user ID assigned by the platform has no entry in /etc/passwd, where libraries look up the name.
    "USER": "cormorant",
    "PYTHONUNBUFFERED": "1",
    "RAY_AUTH_MODE": "token",
    "CORMORANT_LAST_WORDS": TERMINATION_LOG,
}


def head_command(*, epoch: int, floor_frames: int, drain_s: int, is_tls: bool = False) -> list[str]:
    """The head's argument vector.

    Args:
        epoch: incarnation of the head, from 1; attempts and seeds of earlier ones are not used again.
        floor_frames: frames of earlier heads that are not collected again.
        drain_s: seconds after SIGTERM for open batches to be finished and acknowledged.
    """
    return [
        *(*_SUPERVISOR, "head", "--"),
        *("python", "-m", "cormorant_api", "--job", JOB_FILE),
        *("--fleet", "ray", "--ray-address", "auto", "--ray-slot-resources"),
        *("--host", "0.0.0.0", "--port", str(API_PORT), "--data-port", str(DATA_PORT)),
        *("--directory", STATE_FOLDER, "--token-file", TOKEN_FILE),
        *("--epoch", str(epoch), "--floor-frames", str(floor_frames), "--drain-seconds", str(drain_s)),
        *("--last-words", TERMINATION_LOG),
        *((names.TLS_OPTION, f"{TLS_FOLDER}/tls.crt", "--tls-key", f"{TLS_FOLDER}/tls.key") if is_tls else ()),
    ]


def environment(own: Mapping[str, str], *, secret: str) -> list[dict[str, Any]]:
    """Environment of a container: its own variables and the common ones. `secret`: name of the token Secret."""
    return [
        *({"name": name, "value": value} for name, value in {**_COMMON, **own}.items()),
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": "ray"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
