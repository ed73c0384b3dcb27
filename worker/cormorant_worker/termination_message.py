"""The termination message that a container leaves for Kubernetes: the head's own, completed by its supervisor, and the
one sentence of a worker's supervisor.
"""

import json
from pathlib import Path

import structlog

log = structlog.get_logger()

_MOST_BYTES = 4000
"""Kubernetes keeps the last 4096 of a termination message: a longer one would lose the count at its beginning."""


def encode(frames: int, reason: str = "") -> bytes:
    """Encode a message, `{"frames": 1000, "reason": "..."}`, with as much of the reason as Kubernetes keeps."""
    reason = reason[:_MOST_BYTES]
    while True:
        words = {"frames": frames} | ({"reason": reason} if reason else {})
        text = json.dumps(words, ensure_ascii=False).encode(errors="replace")
        if len(text) <= _MOST_BYTES:
            return text
        # A character has at most six bytes in JSON.
        reason = reason[: -((len(text) - _MOST_BYTES + 5) // 6)]


def explain(path: Path | None, reason: str, *, frames: int | None = None) -> None:
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
        path.write_bytes(encode(words["frames"], reason))
    except ValueError:
        return
    except OSError as error:
        log.warning("last_words_not_written", reason=f"cannot use {path}: {error}")


def write_sentence(path: Path | None, reason: str) -> None:
    """Write a worker's message, which is only the reason. None: Kubernetes takes the end of the log."""
    if path is None:
        return
    try:
        path.write_bytes(reason.encode(errors="replace")[:_MOST_BYTES])
    except OSError as error:
        log.warning("last_words_not_written", reason=f"cannot use {path}: {error}")
