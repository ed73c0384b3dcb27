"""Where an inference server is found, and what it did. Light: places and messages carry it."""

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
    """Drawn by this server process, and passed on by the fleet: whoever proves that it knows the key may connect."""
    machine: str = ""
    """`this_machine()` of the server."""

    @property
    def is_on_this_machine(self) -> bool:
        """Whether this process reaches the server's Unix socket, and with it shared memory."""
        return not self.port or (bool(self.machine) and self.machine == this_machine())


@dataclass(slots=True, kw_only=True)
class Served:
    """Inference server -> fleet: what it did since the last of these. Seconds, and counts."""

    rows: int = 0
    padded_rows: int = 0
    acts: int = 0
    requests: int = 0
    wait_s: float = 0.0
    """Summed over requests: from arrival until their act began."""
    act_s: float = 0.0


def this_machine() -> str:
    """Names the kernel and the network namespace: abstract Unix sockets are shared within these. Empty: not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    return ""


class AssignedServers:
    """The servers that a worker may use. Its fleet may assign others at any time, from another thread."""

    def __init__(self, servers: Sequence[ServerAddress] = ()) -> None:
        self._servers = tuple(servers)
        self._turn = 0

    @property
    def current(self) -> ServerAddress:
        """The one to use now."""
        servers = self._servers
        return servers[self._turn % len(servers)]

    @property
    def has_others(self) -> bool:
        return len(self._servers) > 1

    def begin(self, servers: Sequence[ServerAddress]) -> None:
        """Those that the worker was started with, unless it was told of newer ones already."""
        self._servers = self._servers or tuple(servers)

    def assign(self, servers: Sequence[ServerAddress]) -> None:
        """The fleet's choice, the one to use first."""
        self._servers, self._turn = tuple(servers), 0

    def use_next(self) -> None:
        """The current one does not answer: use the next one from now on."""
        self._turn += 1
