"""The order to leave, from a pod's supervisor to the actor in it: a file that appears. Light: imports no Ray."""

import os
from pathlib import Path

LEAVE_FILE = "CORMORANT_LEAVE_FILE"
"""Environment variable with the file's path; Ray hands it on to its workers."""

ACTOR_TITLE = "ray::WorkerActor"
"""How Ray names the process of a worker's actor."""


def is_told_to_leave() -> bool:
    """Whether this actor's pod is about to end."""
    path = os.environ.get(LEAVE_FILE, "")
    return bool(path) and Path(path).exists()
