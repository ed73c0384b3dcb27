"""State of a worker pod: written by the supervisor, read by its probes."""

import time
from dataclasses import dataclass, field

_HUNG_S = 60.0


@dataclass(slots=True, kw_only=True)
class PodState:
    """Single values, each written by one thread: no lock."""

    is_joined: bool = False
    """Ray is a member of the head's cluster."""
    is_leaving: bool = False
    """SIGTERM has come."""
    joins: int = 0
    """How often it has joined a head."""
    ticked: float = field(default_factory=time.monotonic)
    """When the supervisor's loop last ran."""

    def tick(self) -> None:
        self.ticked = time.monotonic()

    @property
    def is_live(self) -> bool:
        """False when the supervisor itself hangs."""
        return time.monotonic() - self.ticked < _HUNG_S
