"""Pause leases: the fleet is paused while any lease is held, or while `spec.paused` is true.

    POST, no lease of this owner  ->  held  ->  DELETE, or expired  ->  gone
    POST by the same owner        ->  the same lease, with a new expiry

Only the thread of `PauseKeeper` pauses and resumes the fleet.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta

import structlog

from cormorant_api.notifier import AsyncNotifier
from cormorant_contract.rest.control import PauseLease, Pauses, PauseState
from cormorant_worker.errors import CormorantError, FleetClosed

log = structlog.get_logger()

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Lease:
    id: str
    owner: str
    reason: str
    created_at: datetime
    expires_at: datetime
    deadline: float
    """When it expires, by the keeper's clock."""


class PauseKeeper:
    """The held leases, and one thread that pauses and resumes the fleet according to them. Thread-safe."""

    def __init__(
        self,
        *,
        pause: Callable[[], None],
        resume: Callable[[], None],
        spec_paused: bool = False,
        starts_paused: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pause` returns when every worker has stopped. `starts_paused`: the fleet was started paused."""
        self.notifier = AsyncNotifier()
        """Notified when the state changes."""
        self.error = ""
        self.spec_paused = spec_paused
        """Call `nudge` after changing it."""
        self._pause, self._resume, self._clock = pause, resume, clock
        self._is_overruled = False
        """True while draining: the fleet must finish its open batches despite leases."""
        self._lock = threading.Lock()
        """Guards `_leases`."""
        self._leases: dict[str, Lease] = {}
        self._is_paused: bool | None = starts_paused
        """None during a call and after a failed one: some workers may be paused, others not."""
        self._nudge = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pauses", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Leave the fleet as it is. May be called twice."""
        self._is_closed = True
        self._nudge.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)  # it may be waiting for a worker that does not respond to a pause

    def nudge(self) -> None:
        self._nudge.set()

    def grant(self, owner: str, *, reason: str, ttl_s: float) -> tuple[Lease, bool]:
        """Grant a lease or renew the owner's. Returns the lease, and True if it is new."""
        created, now = datetime.now(UTC), self._clock()
        with self._lock:
            held = next(
                (lease for lease in self._leases.values() if lease.owner == owner and lease.deadline > now), None
            )
            if is_new := held is None:
                # Not a number: a holder ends its lease of an earlier head, and another's must not have its name.
                held = Lease(f"p{secrets.token_hex(6)}", owner, reason, created, expires_at=created, deadline=now)
            end = created + timedelta(seconds=ttl_s)
            lease = replace(held, reason=reason or held.reason, expires_at=end, deadline=now + ttl_s)
            self._leases[lease.id] = lease
        self._nudge.set()
        return lease, is_new

    def end(self, lease_id: str) -> Lease | None:
        """End a lease; None for an unknown id."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
        self._nudge.set()
        return lease

    def end_of(self, owner: str) -> Lease | None:
        """End the lease of an owner; None if it holds none."""
        return self.end(next((lease.id for lease in self.held() if lease.owner == owner), ""))

    def overrule(self) -> None:
        """Resume the fleet and ignore all leases from now on."""
        self._is_overruled = True
        self._nudge.set()

    def held(self) -> tuple[Lease, ...]:
        now = self._clock()
        with self._lock:
            return tuple(lease for lease in self._leases.values() if lease.deadline > now)

    @property
    def wants_pause(self) -> bool:
        return not self._is_overruled and (self.spec_paused or bool(self.held()))

    @property
    def state(self) -> PauseState:
        """State of the fleet; "paused" while a resume is incomplete."""
        if self.wants_pause:
            return "paused" if self._is_paused else "draining"
        return "running" if self._is_paused is False else "paused"

    @property
    def is_settled(self) -> bool:
        """Whether the fleet's state matches the leases."""
        return self.wants_pause == self._is_paused

    def describe(self) -> Pauses:
        leases = tuple(map(self.describe_lease, self.held()))
        return Pauses(state=self.state, spec_paused=self.spec_paused, leases=leases, error=self.error)

    def describe_lease(self, lease: Lease) -> PauseLease:
        return PauseLease(**asdict(lease), state=self.state)

    def _run(self) -> None:
        while True:
            self._nudge.clear()  # clear before reading: a later change ends the wait below
            if self._is_closed:
                return
            now = self._clock()
            with self._lock:
                over = [lease for lease in self._leases.values() if lease.deadline <= now]
                for lease in over:
                    del self._leases[lease.id]
                next_deadline = min((lease.deadline for lease in self._leases.values()), default=None)
            for lease in over:
                log.info("pause_expired", lease=lease.id, owner=lease.owner)
            if not (self.is_settled or self._settle()):
                self._nudge.wait(_RETRY_S)
            else:  # leases that are granted or ended meanwhile set the event
                self._nudge.wait(None if next_deadline is None else max(0.0, next_deadline - self._clock()))

    def _settle(self) -> bool:
        wanted = self.wants_pause
        self._is_paused = None  # what is asked for meanwhile is not reached by the state that this call leaves
        try:
            (self._pause if wanted else self._resume)()
        except FleetClosed:
            self._is_closed = True
            self._nudge.set()
            return True
        except CormorantError as error:
            if self.error != str(error):
                log.warning("pause_failed" if wanted else "resume_failed", reason=str(error))
            self._is_paused, self.error = None, str(error)
            self.notifier.notify()
            return False
        self._is_paused, self.error = wanted, ""
        self.notifier.notify()
        return True
