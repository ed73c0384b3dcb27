"""Ray's command line, environment and object store, as pods need them. Only this module knows how Ray is started."""

import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cormorant_worker.pod_files import PodFile
from cormorant_worker.supervisor.settings import RaySettings, WorkerSettings

STARTED = "Ray runtime started."
"""Output of `ray start` once the node is registered with the head."""

_LIMITS = {
    # Ray looks at each node once a second. One that has ended fails at once, and is given up after three looks. One
    # without CPU time, or frozen, has three times ten seconds to answer, and so has a head with `limits.cpu: 400m`.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
    # Ray itself ends a node without a head after this; the supervisor notices the end of a head at once (`HeadWatch`).
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
    # A raylet that reaches another head than its own ends after a second instead of a minute.
    "RAY_raylet_liveness_self_check_interval_ms": "1000",
    # The supervisor drains; Ray is stopped at once after that.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
"""How long Ray waits for whom, unless the pod's environment says otherwise."""
_PRELOADED = "cormorant_worker.fleet.ray.actor"
"""Module that a slot's process imports while the head is starting."""
_MIB = 1 << 20
SMALLEST_STORE = 75 * _MIB
"""Smallest object store with which Ray starts."""
_SHM = "/dev/shm"  # where Ray keeps the object store
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of cgroup v2 and v1."""
_STORE_SHARE = 0.4
"""Share of the free space in /dev/shm, or of the container's memory limit, which processes need, too. Kubernetes makes
/dev/shm as large as the limits of all containers together, and as the node's memory where one container has none."""


def head_command(settings: RaySettings) -> list[str]:
    """Command for a head's Ray in the foreground, without resources for workers."""
    head = ("--head", f"--port={settings.gcs_port}", "--no-monitor", "--include-dashboard=false")
    return _start(settings, *head, "--num-cpus=0")


def worker_command(settings: WorkerSettings) -> list[str]:
    """Command for a worker pod's Ray in the foreground, with one resource: the slot."""
    address = join_address(*settings.head)
    slot = json.dumps({f"slot:{settings.slot}": 1})
    # Ray starts a process for each CPU ahead of need: the one that becomes the slot's actor.
    return _start(settings.ray, f"--address={address}", f"--resources={slot}", "--num-cpus=1")


def ray_environment(environment: Mapping[str, str], settings: RaySettings) -> dict[str, str]:
    """Environment variables of Ray and its children."""
    return {
        **_LIMITS,
        **environment,
        **{file.variable: str(settings.path(file)) for file in PodFile},
        # The pod's devices are the worker's, although its actor asks Ray for none.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Logs lie in the pod's /tmp, and the pod lives for as long as the job.
        "RAY_ROTATION_MAX_BYTES": str(16 * _MIB),
        "RAY_ROTATION_BACKUP_COUNT": "1",
        # What it says is read from a pipe, at once.
        "PYTHONUNBUFFERED": "1",
        "RAY_preload_python_modules": _PRELOADED,
    }


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def store_bytes() -> int:
    """Bytes for the object store: a share of what the container may use, but at least what Ray needs to start."""
    room = [shutil.disk_usage(_SHM).free]
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # the other cgroup version's, or "max"
            room.append(int(path.read_text()))
    return max(SMALLEST_STORE, int(_STORE_SHARE * min(room)))


def _start(settings: RaySettings, *what: str) -> list[str]:
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *what),
        f"--node-ip-address={settings.pod_ip}",
        # Any free ones, as Ray takes for itself: several nodes may share a machine.
        *("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"),
        # A slot is a whole pod, and Kubernetes has counted its devices: Ray would only count them again.
        "--num-gpus=0",
        f"--object-store-memory={settings.store_bytes or store_bytes()}",
        f"--temp-dir={settings.folder}",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--log-color=false",
    ]
