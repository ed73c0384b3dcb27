"""What a fleet has counted: of its workers, of those that are gone, and of who waited for whom. Guarded by the fleet's
condition.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal

from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker.engine.messages import Sealed
from cormorant_worker.engine.protocol import GroupStats
from cormorant_worker.weights import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cormorant_worker.engine.member import Member

RestartReason = Literal["crash", "hang", "error"]
_RECENT = 100


class Tally:
    """Numbers that only grow, and the last episodes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin at zero."""
        self.episodes = 0
        self.returns: deque[float] = deque(maxlen=_RECENT)
        self.lengths: deque[int] = deque(maxlen=_RECENT)
        self._clock = clock
        self._gone_frames: Counter[str] = Counter()
        self._gone_env_restarts: Counter[str] = Counter()
        self._gone_spent: dict[str, list[int]] = {}
        self._restarts: dict[str, Counter[RestartReason]] = {}
        self._producer_s = self._consumer_s = 0.0
        self._looked = clock()
        self._was_full = False
        self._waiting = 0

    def seal(self, sealed: Sealed) -> None:
        """A worker finished a batch."""
        self.episodes += len(sealed.returns)
        self.returns.extend(sealed.returns)
        self.lengths.extend(sealed.lengths)

    def bury(self, member: "Member") -> None:
        """A worker is gone: what it did stays counted."""
        group = member.place[0]
        self._gone_frames[group] += member.stepped_frames
        self._gone_env_restarts[group] += member.env_restarts
        spent = member.link.spent_ns
        self._gone_spent[group] = [
            a + b for a, b in zip(self._gone_spent.get(group, [0] * len(spent)), spent, strict=True)
        ]

    def replaced(self, group: str, reason: RestartReason) -> None:
        """A worker that is gone is replaced."""
        self._restarts.setdefault(group, Counter())[reason] += 1

    def look(self, *, is_full: bool) -> None:
        """The fleet's thread comes round: whether workers wait for room from now on."""
        now = self._clock()
        if self._was_full:
            self._producer_s += now - self._looked
        if self._waiting:
            self._consumer_s += now - self._looked
        self._looked, self._was_full = now, is_full

    def waiting(self) -> AbstractContextManager[None]:
        """Inside, a consumer waits for a batch."""
        return self._wait()

    @contextmanager
    def _wait(self) -> "Iterator[None]":
        self.look(is_full=self._was_full)
        self._waiting += 1
        try:
            yield
        finally:
            self.look(is_full=self._was_full)
            self._waiting -= 1

    @property
    def waits_s(self) -> Mapping[str, float]:
        """Seconds in which workers waited for room, and consumers for batches."""
        return {"producer": self._producer_s, "consumer": self._consumer_s}

    def group(self, name: str, members: Iterable["Member"], *, desired: int) -> GroupStats:
        """One worker group.

        Args:
            name: the group.
            members: its workers that live.
            desired: places that are to be filled.
        """
        found = tuple(members)
        spent = list(self._gone_spent.get(name, [0] * len(ACTIVITIES)))
        for member in found:
            spent = [a + b for a, b in zip(spent, member.link.spent_ns, strict=True)]
        ready = [member for member in found if member.is_synced]
        return GroupStats(
            desired=desired,
            ready=len(ready),
            starting=len(found) - len(ready),
            stepped_frames=self._gone_frames[name] + sum(member.stepped_frames for member in found),
            spent_s={activity: ns / 1e9 for activity, ns in zip(ACTIVITIES, spent, strict=True)},
            restarts=dict(self._restarts.get(name, {})),
            env_restarts=self._gone_env_restarts[name] + sum(member.env_restarts for member in found),
            min_version=min((member.version for member in ready), default=PolicyVersion(0)),
        )
