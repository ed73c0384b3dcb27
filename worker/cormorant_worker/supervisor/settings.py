"""Settings from the pod's environment. The only module of the supervisor that reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from cormorant_worker.errors import SupervisorRefused
from cormorant_worker.fleet.ray.pod_files import PodFile

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    pod_ip: str
    """POD_IP: address at which other pods reach this one."""
    gcs_port: int
    """CORMORANT_GCS_PORT: port of a head's Ray."""
    folder: Path
    """CORMORANT_RAY_FOLDER: folder of Ray's sessions, recreated at each start. A short path, because Ray puts sockets
    below it."""
    ports: Literal["fixed", "free"]
    """CORMORANT_RAY_PORTS. fixed: those that network policies can name. free: any, for several nodes on one machine."""
    store_bytes: int
    """CORMORANT_OBJECT_STORE_BYTES: memory for batches; 0: from what /dev/shm and the memory limit allow."""

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
    attempt: int
    """CORMORANT_ATTEMPT: pods that filled the slot before."""
    grace_s: float
    """CORMORANT_GRACE_SECONDS: from SIGTERM to SIGKILL."""
    probe_port: int
    """CORMORANT_PROBE_PORT; 0: any free one."""


def read_ray_settings(environment: Mapping[str, str]) -> RaySettings:
    """Settings of a head's Ray. Raises SupervisorRefused where a variable is invalid."""
    return RaySettings(
        pod_ip=environment.get("POD_IP", "127.0.0.1"),
        gcs_port=_read(environment, "CORMORANT_GCS_PORT", "6379", _port),
        folder=Path(environment.get("CORMORANT_RAY_FOLDER", "/tmp/ray")),  # the pod's own /tmp
        ports=_read(environment, "CORMORANT_RAY_PORTS", "fixed", _ports),
        store_bytes=_read(environment, "CORMORANT_OBJECT_STORE_BYTES", "0", _count),
    )


def read_termination_path(environment: Mapping[str, str]) -> Path | None:
    """Read CORMORANT_LAST_WORDS, the path of the termination message; None: unset."""
    text = environment.get("CORMORANT_LAST_WORDS", "")
    return Path(text) if text else None


def read_worker_settings(environment: Mapping[str, str]) -> WorkerSettings:
    """Settings of a worker. Raises SupervisorRefused where a variable is missing or invalid."""
    group = _read(environment, "CORMORANT_GROUP", "", _name)
    return WorkerSettings(
        ray=read_ray_settings(environment),
        head=_read(environment, "CORMORANT_HEAD", "", _address),
        job=environment.get("CORMORANT_JOB", ""),
        group=group,
        slot=f"{group}-{_read(environment, 'CORMORANT_INDEX', '', _count)}",
        attempt=_read(environment, "CORMORANT_ATTEMPT", "0", _count),
        grace_s=float(_read(environment, "CORMORANT_GRACE_SECONDS", "30", _count)),
        probe_port=_read(environment, "CORMORANT_PROBE_PORT", "8000", _port),
    )


def _read(environment: Mapping[str, str], name: str, default: str, parse: Callable[[str], _Value]) -> _Value:
    text = environment.get(name, default)
    try:
        return parse(text)
    except ValueError as error:
        raise SupervisorRefused(f"the environment variable {name} is {text!r}; it must be {error}") from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a whole number, 0 or more")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise ValueError("a port, from 0 to 65535")
    return int(text)


def _ports(text: str) -> Literal["fixed", "free"]:
    if text == "fixed":
        return "fixed"
    if text == "free":
        return "free"
    raise ValueError('"fixed" or "free"')


def _name(text: str) -> str:
    if not text:
        raise ValueError("a worker group's name")
    return text


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError('host and port, as in "pong-head:6379"')
    return host.strip("[]"), _port(port)
