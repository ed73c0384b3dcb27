"""How an operator is started: its arguments, checked once."""

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
"""The budget of requests to the API server, where none is given."""
COUNTERS_SHARE = 0.7
"""Of the budget, for status writes of counters alone: what else happens has the rest at least, and goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    key: bytes = field(repr=False)
    """Every job's tokens are derived from it: the same in all operators of an installation, for all time."""
    defaults: OperatorDefaults
    namespaces: tuple[str, ...]
    """Looked after; none means all."""
    selector: str
    """Labels of the jobs that are looked after; empty: all."""
    head_url: str
    lease: tuple[str, str] | None
    """Namespace and name of the Lease; None: there is no other operator."""
    identity: str
    probe_port: int
    requests_per_s: float
    """To the API server, on average."""
    request_burst: int
    """Requests at once, after a pause."""


def read_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line.

    Raises:
        SettingsError: with the value that cannot be used.
    """
    given = _parser().parse_args(arguments)
    namespace, _, name = given.lease.partition("/")
    if given.lease and not (namespace and name):
        raise SettingsError(f"--lease {given.lease} is not NAMESPACE/NAME")
    if given.poll_seconds <= 0:
        raise SettingsError(f"--poll-seconds {given.poll_seconds} is not above 0")
    if given.api_qps < 1:
        raise SettingsError(f"--api-qps {given.api_qps} is below 1")
    if given.api_burst < 1:
        raise SettingsError(f"--api-burst {given.api_burst} is below 1")
    for cidr in given.open_to_cidr:
        _check_cidr(cidr)
    defaults = OperatorDefaults(
        image=given.image,
        image_pull_policy=given.image_pull_policy,
        image_pull_secrets=tuple(given.image_pull_secret),
        has_fixed_user=not given.any_user,
        architectures=tuple(given.architecture),
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
        lease=(namespace, name) if given.lease else None,
        identity=f"{socket.gethostname()}-{os.getpid()}",
        probe_port=given.probe_port,
        requests_per_s=given.api_qps,
        request_burst=given.api_burst,
    )


def _check_cidr(text: str) -> None:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise SettingsError(f"--open-to-cidr {text} is not a range of addresses like 10.0.0.0/8: {error}") from error


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"cannot read --key-file {path}: {error}") from error
    if len(key) < _MIN_KEY_BYTES:
        raise SettingsError(f"--key-file {path} holds {len(key)} bytes; a key has at least {_MIN_KEY_BYTES}")
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cormorant_operator", description="Looks after CollectorJobs.")
    parser.add_argument("--key-file", type=Path, required=True, help="the key that jobs' tokens are derived from")
    parser.add_argument("--image", required=True, help="image of jobs that name none: the operator's own")
    parser.add_argument(
        "--architecture", action="append", default=[], metavar="ARCH", help="of --image, like amd64; may be repeated"
    )
    parser.add_argument("--any-user", action="store_true", help="name no user in pods: the platform gives one")
    parser.add_argument("--image-pull-policy", choices=("Always", "IfNotPresent", "Never"), default="IfNotPresent")
    parser.add_argument("--image-pull-secret", action="append", default=[], help="in each job's namespace; repeatable")
    parser.add_argument("--network-policies", action="store_true", help="give each job a NetworkPolicy")
    parser.add_argument(
        "--open-to-cidr", action="append", default=[], help="outside the cluster, let in by that policy; repeatable"
    )
    parser.add_argument("--namespace", action="append", default=[], help="to look after; repeatable; none: all")
    parser.add_argument("--selector", default="", help="labels of the jobs to look after, like team=a (default: all)")
    parser.add_argument("--lease", default="", help="NAMESPACE/NAME of the Lease, when there are several operators")
    parser.add_argument("--poll-seconds", type=float, default=15.0, help="between two looks at a head")
    parser.add_argument(
        "--api-qps", type=float, default=REQUESTS_PER_S, help="requests/s to the API server (default: 50)"
    )
    parser.add_argument("--api-burst", type=int, default=BURST, help="requests at once after a pause (default: 100)")
    parser.add_argument("--head-url", default=DEFAULT_URL, help="with {ip}, {namespace}, {job}, {epoch}")
    parser.add_argument("--probe-port", type=int, default=8080, help="of /livez, /readyz, /metrics; 0: any free one")
    return parser
