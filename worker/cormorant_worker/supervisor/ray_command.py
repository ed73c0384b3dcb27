"""Ray's command line and environment, as pods need them. Pure: the only module that knows how Ray is started."""

import json
import sys
from collections.abc import Mapping

from cormorant_worker.fleet.ray.pod_files import BLOCKED_FILE, HEARTBEAT_FILE, KEPT_FOLDER, LEAVE_FILE
from cormorant_worker.supervisor.settings import RaySettings, WorkerSettings

STARTED = "Ray runtime started."
"""What `ray start` prints once the node is registered with the head."""

_FIXED_PORTS = {
    "--node-manager-port": 6380,
    "--object-manager-port": 6381,
    "--dashboard-agent-listen-port": 6382,
    "--dashboard-agent-grpc-port": 6383,
    "--runtime-env-agent-port": 6384,
    "--metrics-export-port": 6385,
    "--min-worker-port": 10002,
    "--max-worker-port": 10050,
}
_MIB = 1 << 20


def head_command(settings: RaySettings, *, store_bytes: int) -> list[str]:
    """Start the Ray of a head, with no place for workers. In the foreground."""
    return [
        *_start("--head", f"--port={settings.gcs_port}", "--no-monitor", "--include-dashboard=false"),
        *_common(settings, store_bytes=store_bytes),
    ]


def worker_command(settings: WorkerSettings, *, store_bytes: int) -> list[str]:
    """Start the Ray of a worker's pod, which has one resource: the slot. In the foreground."""
    address = join_address(*settings.head)
    slot = json.dumps({f"slot:{settings.slot}": 1})
    return [
        *_start(f"--address={address}", f"--resources={slot}"),
        *_common(settings.ray, store_bytes=store_bytes),
    ]


def ray_environment(environment: Mapping[str, str], settings: RaySettings) -> dict[str, str]:
    """The environment of Ray and of all that it starts."""
    return {
        **environment,
        # The actor looks here for the order to leave.
        LEAVE_FILE: leave_file(settings),
        HEARTBEAT_FILE: heartbeat_file(settings),
        KEPT_FOLDER: kept_folder(settings),
        BLOCKED_FILE: blocked_file(settings),
        # The pod's devices are the worker's, although its actor asks Ray for none.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Logs lie in the pod's /tmp, and the pod lives for as long as the job.
        "RAY_ROTATION_MAX_BYTES": str(16 * _MIB),
        "RAY_ROTATION_BACKUP_COUNT": "1",
        # What it says is read from a pipe, at once.
        "PYTHONUNBUFFERED": "1",
    }


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def leave_file(settings: RaySettings) -> str:
    """The file that tells the worker's actor to leave."""
    return f"{settings.folder}.leave"


def blocked_file(settings: RaySettings) -> str:
    """The file in which the worker's actor says why no worker can run in this pod."""
    return f"{settings.folder}.blocked"


def heartbeat_file(settings: RaySettings) -> str:
    """The file in which the worker's actor keeps its heartbeat."""
    return f"{settings.folder}.pulse"


def kept_folder(settings: RaySettings) -> str:
    """The folder in which actors keep the newest weights; it outlives Ray, and ends with the pod."""
    return f"{settings.folder}.kept"


def _start(*what: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *what]


def _common(settings: RaySettings, *, store_bytes: int) -> list[str]:
    ports = _FIXED_PORTS if settings.ports == "fixed" else dict.fromkeys(_FIXED_PORTS, 0)
    return [
        f"--node-ip-address={settings.pod_ip}",
        *(f"{flag}={port}" for flag, port in ports.items()),
        # A slot is a whole pod, and Kubernetes has counted its CPUs and devices: Ray would only count them again, and
        # start a process for each CPU ahead of need.
        "--num-cpus=0",
        "--num-gpus=0",
        f"--object-store-memory={store_bytes}",
        f"--temp-dir={settings.folder}",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--log-color=false",
    ]
