"""Files shared by a pod's supervisor and the actor in it: the order to leave, the actor's heartbeat, the reason why no
worker can run here, and the weights that actors cache for the next head. Does not import Ray.
"""

import os
from pathlib import Path

import structlog

log = structlog.get_logger()

LEAVE_FILE = "CORMORANT_LEAVE_FILE"
"""Environment variable with the path of the file that tells the actor to leave; Ray passes it to its workers."""

HEARTBEAT_FILE = "CORMORANT_PULSE_FILE"
"""Likewise: file of the actor's heartbeat, for the supervisor's metrics."""

KEPT_FOLDER = "CORMORANT_KEPT_FOLDER"
"""Likewise: folder of the newest weights, for the actor that a new head starts here."""

BLOCKED_FILE = "CORMORANT_BLOCKED_FILE"
"""Likewise: file in which the actor writes why no worker can run in this pod; the supervisor then ends the pod."""

READY_FILE = "CORMORANT_RAY_READY_FILE"
"""Likewise, of a head: file that appears when Ray answers. Ray starts while the head's command imports."""

ACTOR_TITLE = "ray::WorkerActor"
"""Process name of a worker's actor."""


def report_blocked(reason: str) -> None:
    """Tell the pod's supervisor that no worker can run here. Without a supervisor only the head is told."""
    path = os.environ.get(BLOCKED_FILE, "")
    if not path:
        return
    try:
        # Renamed: the supervisor never reads half a sentence.
        Path(f"{path}.new").write_text(reason)
        Path(f"{path}.new").replace(path)
    except OSError as error:
        log.warning("blocked_not_reported", reason=f"cannot write {path}: {error}")
