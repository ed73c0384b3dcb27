"""What a pod's supervisor and the actor in it share: the order to leave (a file that appears), the actor's heartbeat,
and the weights that actors cache for the next head. Light: imports no Ray.
"""

import os
from pathlib import Path

LEAVE_FILE = "CORMORANT_LEAVE_FILE"
"""Environment variable with the file's path; Ray hands it on to its workers."""

PULSE_FILE = "CORMORANT_PULSE_FILE"
"""Likewise: where the actor keeps its heartbeat, for the supervisor's metrics."""

KEPT_FOLDER = "CORMORANT_KEPT_FOLDER"
"""Likewise: where the actor keeps the newest weights, for the actor that a new head starts here."""

ACTOR_TITLE = "ray::WorkerActor"
"""How Ray names the process of a worker's actor."""


def is_told_to_leave() -> bool:
    """Whether this actor's pod is about to end."""
    path = os.environ.get(LEAVE_FILE, "")
    return bool(path) and Path(path).exists()
