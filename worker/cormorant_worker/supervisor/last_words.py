"""The head's last words, where the supervisor knows better than the head why it ended: Ray was gone first."""

import json
from pathlib import Path

import structlog

log = structlog.get_logger()

_LONGEST = 2000
"""Characters of a reason; Kubernetes keeps 4096 bytes of a termination message."""


def explain(path: Path | None, reason: str) -> None:
    """Add the reason to a head's last words, `{"frames": 1000}`, if it left any and no reason of its own.

    Without last words there is nothing to do: Kubernetes takes the end of the log then, and the reason is there.
    """
    if path is None:
        return
    try:
        words = json.loads(path.read_text())
        if not isinstance(words, dict) or "frames" not in words or "reason" in words:
            return
        path.write_text(json.dumps({**words, "reason": reason[:_LONGEST]}))
    except ValueError:
        return
    except OSError as error:
        log.warning("last_words_not_written", reason=f"cannot use {path}: {error}")
