"""The fleet's thread: one turn after the other, each with the fleet's condition held for a moment.

A turn costs what has happened since the last one, whatever the number of workers, and waits for nothing.
"""

import threading
import time
from contextlib import suppress

import structlog

from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.bookkeeping.core import FleetCore
from cormorant_worker.fleet.turn.quiesce import Quiesce
from cormorant_worker.fleet.turn.reaper import Reaper
from cormorant_worker.fleet.turn.selector import ConnectionSelector, Event
from cormorant_worker.fleet.turn.spawner import Spawner
from cormorant_worker.fleet.turn.tickets import Tickets

log = structlog.get_logger()

_POLL_S = 0.2
_TURN_S = 0.001
"""What has come is dealt with for so long at once; then callers may have the condition."""
_MOST_OFFERS = 48
"""In one turn."""
_BREATH_S = 0.0002
_ENDING_S = 10.0


class FleetLoop:
    def __init__(
        self,
        core: FleetCore,
        changed: threading.Condition,
        selector: ConnectionSelector,
        spawner: Spawner,
        reaper: Reaper,
        tickets: Tickets,
        quiesce: Quiesce,
    ) -> None:
        self.is_done = False
        """All frames that will be are accepted, and durable with a dataset."""
        self._core, self._changed, self._selector = core, changed, selector
        self._spawner, self._reaper, self._tickets, self._quiesce = spawner, reaper, tickets, quiesce
        self._is_stopped = False
        self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    @property
    def silent_s(self) -> float:
        """Seconds since the last turn. Never waits."""
        return 0.0 if self._is_stopped else time.monotonic() - self._turned_at

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Make no more turns. With the condition held."""
        self._is_stopped = True
        self._core.waker.wake()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout=_ENDING_S)

    def _run(self) -> None:
        core = self._core
        try:
            has_more = True
            while True:
                ready = self._selector.wait(0.0 if has_more else _POLL_S)
                with self._changed:
                    if self._is_stopped:
                        return
                    has_more = self._turn(ready)
                core.events.tell()  # without the condition: a listener must not hold callers up
                if has_more:
                    time.sleep(_BREATH_S)  # callers that wait for the condition get it
        except Exception as error:
            with self._changed:
                core.lifecycle.fail(FleetError(f"the fleet's thread failed: {type(error).__name__}: {error}"))
                self._changed.notify_all()
            with suppress(OSError, ValueError):  # what failed may be a log line, into a closed pipe or file
                log.exception("fleet_thread_failed")
        finally:
            core.events.tell()

    def _turn(self, ready: list[Event]) -> bool:
        """Deal with what has come, and with everything that may be due. Returns whether there is more."""
        core = self._core
        now = self._turned_at = time.monotonic()
        core.waker.clear()
        has_more = self._selector.deal_with(ready, until=now + _TURN_S)
        core.background.settle()
        self._spawner.start_missing(now)
        self._reaper.end_hung(now)
        core.queue.accept()
        core.counters.tick(is_full=core.queue.is_full)
        core.offers.send_due(_MOST_OFFERS)
        has_more |= core.offers.has_due
        if core.lifecycle.can_collect and not self._quiesce.is_wanted:
            has_more |= self._tickets.hand_out()
        has_more |= self._reaper.finish_idle()
        if core.scheduler.is_done and core.queue.is_drained:
            self.is_done = core.dataset is None or core.pool.is_empty
        self._selector.follow_pool()
        self._changed.notify_all()
        return has_more
