"""Addresses and counters of inference servers. Imports little, because places and messages contain them."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """A server's Unix socket in a local fleet, its TCP port on a cluster."""

    local: bytes = b""
    host: str = ""
    port: int = 0
    key: bytes = field(default=b"", repr=False)
    """Random key of this server process, distributed by the fleet: workers that prove to know it may connect. Empty:
    the fleet is local."""


@dataclass(slots=True, kw_only=True)
class Served:
    """Inference server -> fleet: seconds and counts since the last report."""

    rows: int = 0
    padded_rows: int = 0
    acts: int = 0
    requests: int = 0
    wait_s: float = 0.0
    """Seconds from arrival to the start of the policy call, summed over requests."""
    act_s: float = 0.0


class AssignedServers:
    """The servers of a worker. Its fleet may assign others at any time, from another thread."""

    def __init__(self, servers: Sequence[ServerAddress] = ()) -> None:
        self._servers = tuple(servers)
        self._turn = 0

    @property
    def current(self) -> ServerAddress:
        servers = self._servers
        return servers[self._turn % len(servers)]

    def begin(self, servers: Sequence[ServerAddress]) -> None:
        """Set the worker's initial servers, unless newer ones were already assigned."""
        self._servers = self._servers or tuple(servers)

    def assign(self, servers: Sequence[ServerAddress]) -> None:
        """Assign the fleet's choice, the preferred server first."""
        self._servers, self._turn = tuple(servers), 0

    def use_next(self) -> None:
        """Switch to the next server, because the current one is gone."""
        self._turn += 1
