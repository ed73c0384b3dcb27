"""Structured logs: JSON Lines with the same fields as in heads and workers, or colored text on a terminal.

Inside `about`, every line has the job's name, epoch and weights version.
"""

import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, TextIO

import structlog

from cormorant_operator.job import Job

FIELDS = ("job", "group", "worker", "epoch", "version")
"""Fields of every line, as in heads and workers; null if unknown."""
_FIRST = ("timestamp", "level", "event", *FIELDS)
Event = MutableMapping[str, Any]


def configure_logs(*, level: str = "info", stream: TextIO | None = None) -> None:
    """Configure logging of this level and above to a stream (default: standard output)."""
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
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(out),
    )


def about(job: Job) -> AbstractContextManager[None]:
    """Add the job's fields to log lines of this task inside the block."""
    return structlog.contextvars.bound_contextvars(
        job=job.name,
        namespace=job.namespace,
        epoch=job.status.epoch or None,
        version=job.status.weights.version,
    )


def _in_order(_logger: Any, _method: str, event: Event) -> Mapping[str, Any]:
    return {name: event.get(name) for name in _FIRST} | dict(event)
