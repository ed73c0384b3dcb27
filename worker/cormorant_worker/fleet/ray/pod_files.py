"""What a pod's supervisor and the actor in it share: the order to leave (a file that appears), the actor's heartbeat,
why no worker can run here, and the weights that actors cache for the next head. Light: imports no Ray.
"""

import os
from pathlib import Path

import structlog

log = structlog.get_logger()

LEAVE_FILE = "CORMORANT_LEAVE_FILE"
"""Environment variable with the file's path; Ray hands it on to its workers."""

HEARTBEAT_FILE = "CORMORANT_PULSE_FILE"
"""Likewise: where the actor keeps its heartbeat, for the supervisor's metrics."""

KEPT_FOLDER = "CORMORANT_KEPT_FOLDER"
"""Likewise: where the actor keeps the newest weights, for the actor that a new head starts here."""

BLOCKED_FILE = "CORMORANT_BLOCKED_FILE"
"""Likewise: where the actor writes why no worker can run in this pod, for the supervisor, which ends the pod."""

READY_FILE = "CORMORANT_RAY_READY_FILE"
"""Likewise, of a head: appears when Ray answers, which starts while the head's command imports."""

ACTOR_TITLE = "ray::WorkerActor"
"""How Ray names the process of a worker's actor."""


def report_blocked(reason: str) -> None:
    """Tell the pod's supervisor that no worker can run here. Without a supervisor the head alone is told."""
    path = os.environ.get(BLOCKED_FILE, "")
    if not path:
        return
    try:
        # Renamed: the supervisor never reads half a sentence.
        Path(f"{path}.new").write_text(reason)
        Path(f"{path}.new").replace(path)
    except OSError as error:
        log.warning("blocked_not_reported", reason=f"cannot write {path}: {error}")
