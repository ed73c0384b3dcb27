"""Files shared by a pod's supervisor and the processes in it. Does not import Ray."""

import os
from enum import Enum
from pathlib import Path

import structlog

log = structlog.get_logger()


class PodFile(Enum):
    """By suffix: they lie beside the folder of Ray's sessions, and end with the pod."""

    LEAVE = "leave"
    """Its appearance tells the actor to leave."""
    HEARTBEAT = "pulse"
    """The actor's heartbeat, for the supervisor's metrics."""
    KEPT = "kept"
    """Folder of the newest weights, for the actor that a new head starts here."""
    BLOCKED = "blocked"
    """The actor writes why no worker can run in this pod; the supervisor then ends the pod."""
    READY = "ready"
    """Its appearance tells the head's command that Ray answers. Ray starts while that command imports."""

    @property
    def variable(self) -> str:
        """Environment variable with its path, which Ray passes to its workers."""
        return f"CORMORANT_{self.name}_FILE"

    @property
    def path(self) -> Path | None:
        """None: this process has no supervisor."""
        text = os.environ.get(self.variable, "")
        return Path(text) if text else None


ACTOR_TITLE = "ray::WorkerActor"
"""Process name of a worker's actor."""


def report_blocked(reason: str) -> None:
    """Tell the pod's supervisor that no worker can run here. Without a supervisor only the head is told."""
    if (path := PodFile.BLOCKED.path) is None:
        return
    try:
        # Renamed: the supervisor never reads half a sentence.
        Path(f"{path}.new").write_text(reason)
        Path(f"{path}.new").replace(path)
    except OSError as error:
        log.warning("blocked_not_reported", reason=f"cannot write {path}: {error}")
