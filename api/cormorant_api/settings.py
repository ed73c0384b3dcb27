"""Settings of a head besides the manifest: addresses, directories and time limits; and its sockets.

Imports little: ports are opened before the head imports its web server, so that a kubelet's first probe waits for its
answer instead of being refused.
"""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from cormorant_api.errors import HeadFault


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    data_port: int = 0
    """Port for batches, weights and state; 0: the port after `port`, or any free port if `port` is 0 or the last."""
    directory: Path | None = None
    """Directory of weights, the frame count and tokens; None: keep them in memory."""
    token_file: Path | None = None
    has_tokens: bool = True
    """False: every caller has the role operator; loopback only."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    epoch: int = 0
    """Number of this head in the job, from 1; 0: count in `directory`."""
    floor_frames: int = 0
    """Frames known to be settled by earlier heads; a higher count in `directory` wins."""
    published_version: int = 0
    """Newest version that earlier heads published. A head that does not find it waits for it, or for a learner that
    publishes, before it collects with older weights."""
    weights_within_s: float = 30.0
    """Seconds to wait for `published_version`."""
    termination_message_file: Path | None = None
    """File for the settled frames as JSON, always current (Kubernetes' termination message)."""
    keep_versions: int = 5
    """Versions to retain per model."""
    max_body_bytes: int = 16 << 30
    """Longest body of weights or state for any policy."""
    ack_within_s: float = 60.0
    """Time to acknowledge a batch before it goes to the next consumer."""
    apply_within_s: float = 120.0
    """Unpaused time after which a worker that has not applied weights is late."""
    stall_timeout_s: float = 60.0
    """Longest time for one chunk of a body, in either direction."""
    drain_s: float = 30.0
    """After SIGTERM: time for open batches to be finished and acknowledged."""
    grace_s: float = 5.0
    """At shutdown: time for open requests before they are aborted."""
    linger_s: float = 3.0
    """After the end of the job: time for consumers to learn about it."""

    @property
    def ports(self) -> tuple[int, int]:
        """The control port and the data port; 0: any free one."""
        return self.port, self.data_port or (self.port + 1 if 0 < self.port < 65535 else 0)

    def check(self) -> None:
        """Refuse values that conflict."""
        if not self.has_tokens and not is_loopback(self.host):
            raise HeadFault(
                f"--no-tokens on {self.host}: a head without tokens may listen on loopback only; use --host 127.0.0.1"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise HeadFault("--tls-cert and --tls-key must be given together")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


BACKLOG = 1024
_early: dict[tuple[str, int], socket.socket] = {}


def listen_early(host: str, *ports: int) -> None:
    """Accept connections on these ports; 0 is left out. `bound` returns their sockets later."""
    for port in filter(None, ports):
        early = bound(host, port)
        early.listen(BACKLOG)
        _early[host, port] = early


def bound(host: str, port: int) -> socket.socket:
    """A socket on this port (0: any free one), for IPv4 too if the host is `::`. HeadFault if it is not available."""
    if (early := _early.pop((host, port), None)) is not None:
        return early
    listening = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        if listening is not None:
            listening.close()
        raise HeadFault(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port (batches and "
            "weights use the one after it)"
        ) from error
    return listening
