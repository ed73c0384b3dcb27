"""The operator's command line."""

import argparse
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cormorant_operator.defaults import OperatorDefaults
from cormorant_operator.errors import SettingsError
from cormorant_operator.head_client import DEFAULT_URL

_MIN_KEY_BYTES = 32
REQUESTS_PER_S, BURST = 50.0, 100
"""Default rate limit of requests to the API server."""
COUNTERS_SHARE = 0.85
"""Share of the rate limit for counter-only status writes. Everything else goes first and has at least the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    key: bytes = field(repr=False)
    """Job tokens are derived from it; it must never change, and is the same for all replicas."""
    defaults: OperatorDefaults
    namespaces: tuple[str, ...]
    """Namespaces to watch; empty: all."""
    selector: str
    """Label selector of the jobs to manage; empty: all."""
    head_url: str
    head_ca_file: Path | None
    """Authorities of heads' certificates, beside the system's."""
    lease: tuple[str, str] | None
    """Namespace and name of the Lease; None: no leader election."""
    identity: str
    probe_port: int
    requests_per_s: float
    request_burst: int
    log_level: str
    """The lowest level that is logged."""


def read_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line.

    Raises:
        SettingsError: names the invalid value.
    """
    given = _parser().parse_args(arguments)
    namespace, _, name = given.lease.partition("/")
    if given.lease and not (namespace and name):
        raise SettingsError(f"--lease {given.lease}: expected NAMESPACE/NAME")
    if given.poll_seconds <= 0:
        raise SettingsError(f"--poll-seconds {given.poll_seconds}: must be greater than 0")
    if given.api_qps < 1:
        raise SettingsError(f"--api-qps {given.api_qps}: must be at least 1")
    if given.api_burst < 1:
        raise SettingsError(f"--api-burst {given.api_burst}: must be at least 1")
    for cidr in given.open_to_cidr:
        _check_cidr(cidr)
    defaults = OperatorDefaults(
        image=given.image,
        cuda_image=given.cuda_image,
        image_pull_policy=given.image_pull_policy,
        image_pull_secrets=tuple(given.image_pull_secret),
        has_fixed_user=not given.any_user,
        architectures=tuple(given.architecture),
        has_image_volumes=given.image_volumes,
        has_network_policies=given.network_policies,
        open_to_cidrs=tuple(given.open_to_cidr),
        poll_s=given.poll_seconds,
        counters_per_s=COUNTERS_SHARE * given.api_qps,
    )
    return Settings(
        key=_read_key(given.key_file),
        defaults=defaults,
        namespaces=tuple(given.namespace),
        selector=given.selector,
        head_url=given.head_url,
        head_ca_file=given.head_ca_file,
        lease=(namespace, name) if given.lease else None,
        identity=f"{socket.gethostname()}-{os.getpid()}",
        probe_port=given.probe_port,
        requests_per_s=given.api_qps,
        request_burst=given.api_burst,
        log_level=given.log_level,
    )


def _check_cidr(text: str) -> None:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise SettingsError(f"--open-to-cidr {text} is not a CIDR such as 10.0.0.0/8: {error}") from error


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"cannot read --key-file {path}: {error}") from error
    if len(key) < _MIN_KEY_BYTES:
        raise SettingsError(f"--key-file {path} holds {len(key)} bytes; a key has at least {_MIN_KEY_BYTES}")
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cormorant_operator", description="The Cormorant operator: runs CollectorJobs."
    )
    parser.add_argument(
        "--key-file", type=Path, required=True, help="file with the key that job tokens are derived from"
    )
    parser.add_argument("--image", required=True, help="image of jobs that do not set spec.image")
    parser.add_argument(
        "--cuda-image", default="", help="image of their workers in groups with `device: gpu` (default: --image)"
    )
    parser.add_argument(
        "--architecture",
        action="append",
        default=[],
        metavar="ARCH",
        help="CPU architecture of these images, such as amd64 (repeatable)",
    )
    parser.add_argument(
        "--any-user", action="store_true", help="do not set runAsUser in pods; the platform assigns a user (OpenShift)"
    )
    parser.add_argument("--image-pull-policy", choices=("Always", "IfNotPresent", "Never"), default="IfNotPresent")
    parser.add_argument(
        "--image-pull-secret", action="append", default=[], help="Secret in each job's namespace (repeatable)"
    )
    parser.add_argument(
        "--image-volumes", action="store_true", help="mount spec.code.image as a volume instead of copying its files"
    )
    parser.add_argument("--network-policies", action="store_true", help="create a NetworkPolicy for each job")
    parser.add_argument(
        "--open-to-cidr",
        action="append",
        default=[],
        help="CIDR outside the cluster that this policy admits (repeatable)",
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="namespace to watch (repeatable; default: all)"
    )
    parser.add_argument(
        "--selector", default="", help="label selector of the jobs to manage, such as team=a (default: all)"
    )
    parser.add_argument(
        "--lease", default="", help="NAMESPACE/NAME of the leader election Lease, if several operators run"
    )
    parser.add_argument(
        "--poll-seconds", type=float, default=15.0, help="seconds between two polls of a head (default: 15)"
    )
    parser.add_argument(
        "--api-qps", type=float, default=REQUESTS_PER_S, help="sustained requests/s to the API server (default: 50)"
    )
    parser.add_argument(
        "--api-burst", type=int, default=BURST, help="burst of requests to the API server (default: 100)"
    )
    parser.add_argument(
        "--head-url",
        default=DEFAULT_URL,
        help="URL of a head; may contain {scheme}, {ip}, {namespace}, {job} and {epoch}",
    )
    parser.add_argument(
        "--head-ca-file",
        type=Path,
        help="PEM file of authorities that sign heads' certificates (default: the system's)",
    )
    parser.add_argument(
        "--probe-port", type=int, default=8080, help="port of /livez, /readyz and /metrics (0: any free port)"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser
