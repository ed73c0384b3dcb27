"""How the operator logs: one JSON object a line, with the fields of all processes; for people on a terminal.

What a line is about comes from where it is written: inside `about` every line has the job's name, epoch and version.
"""

import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, TextIO

import structlog

from cormorant_operator.job import Job

FIELDS = ("job", "group", "worker", "epoch", "version")
"""On each line, as in heads and pods; null where there is nothing to say."""
_FIRST = ("timestamp", "level", "event", *FIELDS)
Event = MutableMapping[str, Any]


def configure_logs(*, stream: TextIO | None = None) -> None:
    """Log to a stream from now on, standard output by default: as JSON, or in colours where it is a terminal."""
    out = stream or sys.stdout
    last: list[Callable[[Any, str, Event], Any]] = [_in_order, structlog.processors.JSONRenderer(default=str)]
    if out.isatty():
        last = [structlog.dev.ConsoleRenderer()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *last,
        ],
        logger_factory=structlog.WriteLoggerFactory(out),
    )


def about(job: Job) -> AbstractContextManager[None]:
    """Inside, lines of this task are about a job."""
    return structlog.contextvars.bound_contextvars(
        job=job.name,
        namespace=job.identity.namespace,
        epoch=job.status.epoch or None,
        version=job.status.weights.version,
    )


def _in_order(_logger: Any, _method: str, event: Event) -> Mapping[str, Any]:
    return {name: event.get(name) for name in _FIRST} | dict(event)
