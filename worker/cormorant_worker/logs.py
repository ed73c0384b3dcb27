"""How processes of a job log: one JSON object a line, with the same five fields on each; for people on a terminal.

    {"timestamp": ..., "level": "warning", "event": "worker_lost", "job": "pong", "group": "cpu", "worker": "cpu-0",
     "epoch": 2, "version": 17, "reason": ...}

Light: the supervisor uses it, too.
"""

import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TextIO

import structlog

FIELDS = ("job", "group", "worker", "epoch", "version")
"""On each line; null where a process cannot know."""
_FIRST = ("timestamp", "level", "event", *FIELDS)
Event = MutableMapping[str, Any]


@dataclass(slots=True)
class LogContext:
    """What a process says of itself on each line. Single values, each written by one thread."""

    job: str = ""
    group: str = ""
    worker: str = ""
    """`<group>-<index>`."""
    epoch: int | None = None
    """Which incarnation of the head, from 1."""
    version: int | None = None
    """The newest policy version that it knows of."""


def configure_logs(context: LogContext, *, stream: TextIO | None = None) -> None:
    """Log to a stream from now on: as JSON, or in colours where it is a terminal.

    Args:
        context: on each line that does not say otherwise; may change later.
        stream: standard output by default.
    """
    out = stream or sys.stdout
    last: list[Callable[[Any, str, Event], Any]] = [_in_order, structlog.processors.JSONRenderer(default=str)]
    if out.isatty():
        last = [_without_empty, structlog.dev.ConsoleRenderer()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _with(context),
            *last,
        ],
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )


def _with(context: LogContext) -> Callable[[Any, str, Event], Event]:
    def add(_logger: Any, _method: str, event: Event) -> Event:
        if not event.get("group") and event.get("worker"):
            event["group"] = str(event["worker"]).rpartition("-")[0]
        for name in FIELDS:
            event.setdefault(name, getattr(context, name))
        return event

    return add


def _in_order(_logger: Any, _method: str, event: Event) -> Mapping[str, Any]:
    return {name: event.get(name) for name in _FIRST} | dict(event)


def _without_empty(_logger: Any, _method: str, event: Event) -> Event:
    for name in FIELDS:
        if event.get(name) in ("", None):
            event.pop(name, None)
    return event
