"""Events of a fleet, for listeners: the head's event stream, its update objects, its metrics."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from cormorant_worker.worker.messages import Sealed

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """One event. Fields that a kind does not use keep their defaults."""

    kind: str
    """applied: `worker` uses `version` from its next frame on. refused: it cannot use `version`, for `reason`.
    worker_ready: it may collect; `reason` says how it calls the policy. worker_lost: it is gone for `reason`, and
        `frames` are collected again. sealed: it finished a batch of `frames`, whose oldest version is `version`;
        `sealed` has details. accepted: a round of `frames` entered the queue and counts. lent: a
    consumer has one of `frames`, whose oldest version is `version`, `staleness` versions old. published: `version` is
    offered to workers. seeded: every worker is reseeded, with the seed in `reason`. dropped: `frames` will not be
    delivered, for `reason` (crash, stale, drop_oldest, drain, restore, seed). failed: the fleet failed, for
    `reason`."""
    worker: str = ""
    """`<group>-<index>`."""
    version: int = 0
    frames: int = 0
    reason: str = ""
    staleness: int = 0
    sealed: "Sealed | None" = None


Listener = Callable[[FleetEvent], None]


class Events:
    """Pending events. Call `note` with the fleet's condition held; only the fleet's thread calls `tell`."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._noted: deque[FleetEvent] = deque()

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def note(self, kind: str, **fields: Any) -> None:
        # Called several times per batch: without listeners, no event is made.
        if self._listeners:
            self._noted.append(FleetEvent(kind=kind, **fields))

    def tell(self) -> None:
        """Pass noted events to all listeners, in order. Exceptions of listeners are logged."""
        while self._noted:
            event = self._noted.popleft()
            for listener in tuple(self._listeners):
                try:
                    listener(event)
                except Exception:
                    log.exception("listener_failed", event_kind=event.kind)
