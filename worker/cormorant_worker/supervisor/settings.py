"""Settings from the pod's environment. The only module of the supervisor that reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cormorant_worker.errors import CormorantError
from cormorant_worker.pod_files import PodFile

_Value = TypeVar("_Value")


class SupervisorRefused(CormorantError):
    """The arguments or the environment of a pod's supervisor cannot be used (exit code 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    pod_ip: str
    """POD_IP: address at which other pods reach this one."""
    gcs_port: int
    """CORMORANT_GCS_PORT: port of a head's Ray."""
    folder: Path
    """CORMORANT_RAY_FOLDER: folder of Ray's sessions, recreated at each start. A short path, because Ray puts sockets
    below it."""
    store_bytes: int
    """CORMORANT_OBJECT_STORE_BYTES: memory for batches; 0: from what /dev/shm allows."""

    def path(self, file: PodFile) -> Path:
        return Path(f"{self.folder}.{file.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    ray: RaySettings
    head: tuple[str, int]
    """CORMORANT_HEAD: host and port of the Service that leads to the head's Ray."""
    job: str
    """CORMORANT_JOB: the job's name, for logs and metrics."""
    group: str
    """CORMORANT_GROUP."""
    slot: str
    """`<CORMORANT_GROUP>-<CORMORANT_INDEX>`."""
    grace_s: float
    """CORMORANT_GRACE_SECONDS: from SIGTERM to SIGKILL."""
    probe_port: int
    """CORMORANT_PROBE_PORT; 0: any free one."""


def read_ray_settings(environment: Mapping[str, str]) -> RaySettings:
    """Settings of a head's Ray. Raises SupervisorRefused where a variable is invalid."""
    return RaySettings(
        pod_ip=environment.get("POD_IP", "127.0.0.1"),
        gcs_port=_read(environment, "CORMORANT_GCS_PORT", int, "6379"),
        folder=Path(environment.get("CORMORANT_RAY_FOLDER", "/tmp/ray")),  # the pod's own /tmp
        store_bytes=_read(environment, "CORMORANT_OBJECT_STORE_BYTES", int, "0"),
    )


def read_termination_path(environment: Mapping[str, str]) -> Path | None:
    """Read CORMORANT_LAST_WORDS, the path of the termination message; None: unset."""
    text = environment.get("CORMORANT_LAST_WORDS", "")
    return Path(text) if text else None


def read_worker_settings(environment: Mapping[str, str]) -> WorkerSettings:
    """Settings of a worker. Raises SupervisorRefused where a variable is missing or invalid."""
    group = _read(environment, "CORMORANT_GROUP", str)
    return WorkerSettings(
        ray=read_ray_settings(environment),
        head=_read(environment, "CORMORANT_HEAD", _address),
        job=environment.get("CORMORANT_JOB", ""),
        group=group,
        slot=f"{group}-{_read(environment, 'CORMORANT_INDEX', int)}",
        grace_s=_read(environment, "CORMORANT_GRACE_SECONDS", float, "30"),
        probe_port=_read(environment, "CORMORANT_PROBE_PORT", int, "8000"),
    )


def _read(environment: Mapping[str, str], name: str, parse: Callable[[str], _Value], default: str = "") -> _Value:
    text = environment.get(name, default)
    try:
        if not text:
            raise ValueError("it must be set")  # noqa: TRY301  # as for other values
        return parse(text)
    except ValueError as error:
        raise SupervisorRefused(
            f"the environment variable {name} is {text!r}: {error}; docs/reference/pods.md says what the operator sets"
        ) from None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
