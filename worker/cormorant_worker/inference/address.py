"""Where an inference server on another node is found. Light: places and messages carry it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """A server in a cluster: its TCP port for all nodes, and its Unix socket for its own."""

    host: str
    port: int
    key: bytes = field(repr=False)
    """Drawn by this server process, and passed on by the fleet: whoever proves that it knows the key may connect."""
    machine: str
    """`this_machine()` of the server."""
    local: bytes | str
    """Address of its Unix socket."""

    @property
    def is_on_this_machine(self) -> bool:
        """Whether this process reaches the server's Unix socket, and with it shared memory."""
        return bool(self.machine) and self.machine == this_machine()


Address = bytes | str | NodeAddress
"""Where a server listens: a Unix socket of this machine, or a `NodeAddress`."""


def this_machine() -> str:
    """Names the kernel and the network namespace: abstract Unix sockets are shared within these. Empty: not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    return ""


class AssignedServers:
    """The servers that a worker may use. Its fleet may assign others at any time, from another thread."""

    def __init__(self, servers: Sequence[Address] = ()) -> None:
        self._servers = tuple(servers)
        self._turn = 0

    @property
    def current(self) -> Address:
        """The one to use now."""
        servers = self._servers
        return servers[self._turn % len(servers)]

    @property
    def has_others(self) -> bool:
        return len(self._servers) > 1

    def begin(self, servers: Sequence[Address]) -> None:
        """Those that the worker was started with, unless it was told of newer ones already."""
        self._servers = self._servers or tuple(servers)

    def assign(self, servers: Sequence[Address]) -> None:
        """The fleet's choice, the one to use first."""
        self._servers, self._turn = tuple(servers), 0

    def use_next(self) -> None:
        """The current one does not answer: use the next one from now on."""
        self._turn += 1
