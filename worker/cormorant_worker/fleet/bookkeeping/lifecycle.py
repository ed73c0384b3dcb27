"""Whether a fleet runs, is paused, closes, or cannot go on."""

from cormorant_worker.errors import CormorantError, WorkerFailed
from cormorant_worker.fleet.events import Events


class Lifecycle:
    """Guarded by the fleet's condition."""

    def __init__(self, events: Events, *, is_paused: bool) -> None:
        self._events = events
        self.is_paused = is_paused
        self.is_closing = False
        self.error: CormorantError | None = None
        """Why the fleet cannot go on: the first cause."""

    @property
    def can_collect(self) -> bool:
        return not (self.is_paused or self.is_closing or self.error is not None)

    def pause(self) -> None:
        if not self.is_paused:
            self._events.note("paused")
        self.is_paused = True

    def resume(self) -> None:
        if self.is_paused:
            self._events.note("resumed")
        self.is_paused = False

    def fail(self, error: Exception, *, what: str = "") -> None:
        """The fleet cannot go on. `what`: what could not be done, for errors that are not ours: "start a worker"."""
        if self.error is None:
            known = isinstance(error, CormorantError)
            self.error = error if known else WorkerFailed(f"cannot {what}: {type(error).__name__}: {error}")  # type: ignore[assignment]  # checked
            self._events.note("failed", reason=str(self.error))

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error
