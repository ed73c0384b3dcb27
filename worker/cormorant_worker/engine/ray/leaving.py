"""Two files between a pod's supervisor and the actor in it: the order to leave, which appears, and the actor's pulse.
Light: imports no Ray.
"""

import os
from pathlib import Path

LEAVE_FILE = "CORMORANT_LEAVE_FILE"
"""Environment variable with the file's path; Ray hands it on to its workers."""

PULSE_FILE = "CORMORANT_PULSE_FILE"
"""Likewise: where the actor keeps its pulse, for the supervisor's metrics."""

ACTOR_TITLE = "ray::WorkerActor"
"""How Ray names the process of a worker's actor."""


def is_told_to_leave() -> bool:
    """Whether this actor's pod is about to end."""
    path = os.environ.get(LEAVE_FILE, "")
    return bool(path) and Path(path).exists()
