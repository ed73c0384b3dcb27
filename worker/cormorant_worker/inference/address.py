"""Addresses and counters of inference servers. Imports little, because places and messages contain them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """A server's Unix socket for its own machine, and its TCP port for all nodes of a cluster."""

    local: bytes
    host: str = ""
    port: int = 0
    """0: all workers are on the server's machine."""
    key: bytes = field(default=b"", repr=False)
    """Random key of this server process, distributed by the fleet: workers that prove to know it may connect."""
    machine: str = ""
    """`this_machine()` of the server."""

    @property
    def is_on_this_machine(self) -> bool:
        """Whether this process reaches the server's Unix socket, and with it shared memory."""
        return not self.port or (bool(self.machine) and self.machine == this_machine())


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


def this_machine() -> str:
    """Id of the kernel and network namespace, within which abstract Unix sockets are shared. Empty: unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    return ""


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
