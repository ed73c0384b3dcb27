"""Files by which a pod's supervisor, its processes and Kubernetes learn of each other: markers beside Ray's folder, and
the termination message, which is the head's own, completed by its supervisor, or a worker's supervisor's one sentence.
"""

import json
import os
from enum import Enum
from pathlib import Path

import structlog

log = structlog.get_logger()

_LONGEST_REASON = 650
"""Kubernetes keeps the last 4096 bytes of a termination message, and would drop the count at its beginning. A character
has at most six bytes in JSON."""


class PodFile(Enum):
    """By suffix: they lie beside the folder of Ray's sessions, and end with the pod."""

    LEAVE = "leave"
    """Its appearance tells the actor to leave."""
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


def termination_message(frames: int, reason: str = "") -> bytes:
    """Encode a message, `{"frames": 1000, "reason": "..."}`."""
    words = {"frames": frames} | ({"reason": reason[:_LONGEST_REASON]} if reason else {})
    return json.dumps(words, ensure_ascii=False).encode(errors="replace")


def explain_end(path: Path | None, reason: str, *, frames: int | None = None) -> None:
    """Add the reason to a head's message, `{"frames": 1000}`, if the head left none. `frames`: of a head that ended
    before it had counted any; None: do nothing without a message, because Kubernetes then takes the end of the log.
    """
    if path is None:
        return
    try:
        text = path.read_text() if path.exists() else ""
        words = json.loads(text) if text else {"frames": frames} if frames is not None else {}
        if not isinstance(words, dict) or "frames" not in words or "reason" in words:
            return
        path.write_bytes(termination_message(words["frames"], reason))
    except ValueError:
        return
    except OSError as error:
        log.warning("last_words_not_written", reason=f"cannot use {path}: {error}")


def write_sentence(path: Path | None, reason: str) -> None:
    """Write a worker's message, which is only the reason. None: Kubernetes takes the end of the log."""
    if path is None:
        return
    try:
        path.write_bytes(reason[:_LONGEST_REASON].encode(errors="replace"))
    except OSError as error:
        log.warning("last_words_not_written", reason=f"cannot use {path}: {error}")
