"""Configuration of one operator installation: its command line, and the defaults and intervals that decisions read."""

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cormorant_contract.children import API_PORT
from cormorant_operator.errors import SettingsError

DEFAULT_URL = f"{{scheme}}://{{ip}}:{API_PORT}"
_MIN_KEY_BYTES = 32
REQUESTS_PER_S, BURST = 50.0, 100
"""Default rate limit of requests to the API server."""
COUNTERS_SHARE = 0.85
"""Share of the rate limit for counter-only status writes. Everything else goes first and has at least the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of the command line, which `_parser` describes."""

    key: bytes = field(repr=False)
    """Job tokens are derived from it; it must never change, and is the same for all replicas."""
    defaults: "OperatorDefaults"
    namespaces: tuple[str, ...]
    selector: str
    head_url: str
    head_ca_file: Path | None
    lease: tuple[str, str] | None
    """Namespace and name of the Lease; None: no leader election."""
    identity: str
    probe_port: int
    requests_per_s: float
    request_burst: int
    log_level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDefaults:
    """Defaults and intervals from the command line, which decisions read."""

    image: str = "cormorant:dev"
    cuda_image: str = ""
    """Image of these jobs' workers with a device; empty: `image`."""
    image_pull_secrets: tuple[str, ...] = ()
    has_fixed_user: bool = True
    """Pods run as user 65532. Off on platforms that assign users per namespace, such as OpenShift."""
    architectures: tuple[str, ...] = ()
    """CPU architectures of `image` (label kubernetes.io/arch); empty: unknown."""
    has_image_volumes: bool = False
    has_network_policies: bool = False
    has_pod_groups: bool = False
    """The API server serves PodGroups: each job without a queue gets one. Found out by the controller."""
    poll_s: float = 15.0
    """Interval of polling a head."""
    fast_poll_s: float = 2.0
    """Polling interval while a decision waits for the head's answer."""
    counters_interval_s: float = 15.0
    """Minimum interval between counter-only status writes of one job; `for_jobs` stretches it."""
    counters_per_s: float = 42.5
    """Budget of counter-only status writes per second, for all jobs."""
    resync_retry_s: float = 10.0
    """Delay after a failed resync."""
    stood_still_s: float = 10.0
    """If the operator stood still for longer, it has missed events."""

    def for_jobs(self, number: int) -> "OperatorDefaults":
        """Stretch `counters_interval_s` so that this many jobs stay within `counters_per_s`."""
        needed_s = number / self.counters_per_s
        return replace(self, counters_interval_s=needed_s) if needed_s > self.counters_interval_s else self


def read_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line. Raises SettingsError, which names an invalid value."""
    given = _parser().parse_args(arguments)
    namespace, _, name = given.lease.partition("/")
    if given.lease and not (namespace and name):
        raise SettingsError(f"--lease {given.lease}: expected NAMESPACE/NAME")
    try:
        key = given.key_file.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"cannot read --key-file {given.key_file}: {error}") from error
    if len(key) < _MIN_KEY_BYTES:
        raise SettingsError(f"--key-file {given.key_file} holds {len(key)} bytes; a key has at least {_MIN_KEY_BYTES}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()
    }
    own = {field.name: values.pop(field.name) for field in fields(Settings) if field.name in values}
    del values["key_file"]
    return Settings(
        **{
            **own,
            "key": key,
            "defaults": OperatorDefaults(**values, counters_per_s=COUNTERS_SHARE * given.requests_per_s),
            "lease": (namespace, name) if given.lease else None,
            "identity": f"{socket.gethostname()}-{os.getpid()}",
        }
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cormorant_operator", description="The Cormorant operator: runs CollectorJobs."
    )
    add = parser.add_argument

    def add_list(option: str, *, dest: str, what: str) -> None:
        add(option, dest=dest, action="append", default=[], help=f"{what} (repeatable)")

    # Destinations are fields of Settings and OperatorDefaults.
    add("--key-file", type=Path, required=True, help="file with the key that job tokens are derived from")
    add("--image", required=True, help="image of jobs that do not set spec.image")
    add("--cuda-image", default="", help="image of their workers in groups with `device: gpu` (default: --image)")
    add_list("--architecture", dest="architectures", what="CPU architecture of these images, such as amd64")
    add("--any-user", dest="has_fixed_user", action="store_false", help="let the platform assign users (OpenShift)")
    add_list("--image-pull-secret", dest="image_pull_secrets", what="Secret in each job's namespace")
    add("--image-volumes", dest="has_image_volumes", action="store_true", help="mount spec.code.image as a volume")
    add("--network-policies", dest="has_network_policies", action="store_true", help="give each job a NetworkPolicy")
    add_list("--namespace", dest="namespaces", what="namespace to watch; default: all")
    add("--selector", default="", help="label selector of the jobs to manage, such as team=a (default: all)")
    add("--lease", default="", help="NAMESPACE/NAME of the leader election Lease, if several operators run")
    add("--poll-seconds", dest="poll_s", type=float, default=15.0, help="seconds between two polls of a head (15)")
    add("--api-qps", dest="requests_per_s", type=float, default=REQUESTS_PER_S, help="API requests per second (50)")
    add("--api-burst", dest="request_burst", type=int, default=BURST, help="burst of such requests (100)")
    add("--head-url", default=DEFAULT_URL, help="URL of a head; may contain {scheme}, {ip}, {namespace} and {job}")
    add("--head-ca-file", type=Path, help="PEM file of authorities of heads' certificates (default: the system's)")
    add("--probe-port", type=int, default=8080, help="port of /livez, /readyz and /metrics (0: any free port)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser
