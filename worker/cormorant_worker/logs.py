"""Logging of a job's processes: one JSON object per line with the same five fields, or readable text on a terminal.

    {"timestamp": ..., "level": "warning", "event": "worker_lost", "job": "pong", "group": "cpu", "worker": "cpu-0",
     "epoch": 2, "version": 17, "reason": ...}

Imports little, because the supervisor also uses it.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

import structlog

FIELDS = ("job", "group", "worker", "epoch", "version")
"""Fields of every line; null if a process does not know the value."""
_FIRST = ("timestamp", "level", "event", *FIELDS)
_NOT_SHOWN = frozenset({"timestamp", "level", "event", "exception", "job", "epoch"})
_LONGEST_LINE = 2000
Event = MutableMapping[str, Any]


@dataclass(slots=True)
class LogContext:
    """Fields about the process itself. Single values, each written by one thread."""

    job: str = ""
    group: str = ""
    worker: str = ""
    """`<group>-<index>`."""
    epoch: int | None = None
    """Incarnation of the head, from 1."""
    version: int | None = None
    """The newest policy version that it knows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLine:
    number: int
    """Line number, from 0 in each process."""
    time: datetime
    level: str
    text: str


class LogTail:
    """A structlog processor that remembers the last lines, for the live page. Thread-safe."""

    def __init__(self, *, size: int = 200) -> None:
        self._lock = threading.Lock()
        """Guards everything below."""
        self._lines: deque[LoggedLine] = deque(maxlen=size)
        self._next = 0

    def __call__(self, _logger: Any, _method: str, event: Event) -> Event:
        shown = {key: value for key, value in event.items() if key not in _NOT_SHOWN and value not in ("", None)}
        text = " ".join([str(event.get("event", "")), *(f"{key}={value}" for key, value in shown.items())])
        if event.get("exception"):
            text += f"\n{event['exception']}"
        with self._lock:
            now = datetime.now(UTC)
            level = str(event.get("level", "info"))
            self._lines.append(LoggedLine(number=self._next, time=now, level=level, text=text[:_LONGEST_LINE]))
            self._next += 1
        return event

    def since(self, number: int) -> list[LoggedLine]:
        with self._lock:
            return [line for line in self._lines if line.number >= number]


TAIL = LogTail()


def configure_logs(context: LogContext, *, stream: TextIO | None = None) -> None:
    """Log to a stream (standard output): as JSON, or in color on a terminal. `context`: fields of each line, which may
    change.
    """
    out = stream or sys.stdout
    last: list[Callable[[Any, str, Event], Any]] = [
        lambda _logger, _method, event: {name: event.get(name) for name in _FIRST} | dict(event),
        structlog.processors.JSONRenderer(default=str),
    ]
    if out.isatty():
        last = [_without_empty, structlog.dev.ConsoleRenderer()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            TAIL,
            _with(context),
            *last,
        ],
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )


def quiet_by_default() -> None:
    """Unless the program has configured structlog, log only warnings and errors, to standard error."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _only_warnings,  # and no filtering logger: `structlog.testing.capture_logs` still gets every event
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # the one of this moment: notebooks replace it
    )


def _only_warnings(_logger: Any, _method: str, event: Event) -> Event:
    if event["level"] in ("debug", "info"):
        raise structlog.DropEvent
    return event


def _with(context: LogContext) -> Callable[[Any, str, Event], Event]:
    def add(_logger: Any, _method: str, event: Event) -> Event:
        if not event.get("group") and event.get("worker"):
            event["group"] = str(event["worker"]).rpartition("-")[0]
        for name in FIELDS:
            event.setdefault(name, getattr(context, name))
        return event

    return add


def _without_empty(_logger: Any, _method: str, event: Event) -> Event:
    for name in FIELDS:
        if event.get(name) in ("", None):
            event.pop(name, None)
    return event
