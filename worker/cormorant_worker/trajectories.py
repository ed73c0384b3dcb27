"""Which trajectory each environment is in, and what it has earned so far. Owned by one collector.

A trajectory id is unique over the whole fleet, for all time, without asking anybody:

    63 bits = group (3) | slot index (13) | attempt (13) | n-th trajectory of this attempt (34)
"""

from dataclasses import dataclass, field

import numpy as np

from cormorant_worker.errors import CormorantError
from cormorant_worker.seeding import SeedPath
from cormorant_worker.spaces import Array

_GROUP_BITS, _INDEX_BITS, _ATTEMPT_BITS, _COUNTER_BITS = 3, 13, 13, 34


def trajectory_base(path: SeedPath) -> int:
    """The lowest trajectory id of a worker: its group, index and attempt in the upper bits.

    Raises:
        CormorantError: a number is too large for its bits.
    """
    base = 0
    for name, number, bits in (
        ("group", path.group_number, _GROUP_BITS),
        ("index", path.index, _INDEX_BITS),
        ("attempt", path.attempt, _ATTEMPT_BITS),
    ):
        if not 0 <= number < 1 << bits:
            raise CormorantError(f"worker {name} {number} does not fit a trajectory id; at most {(1 << bits) - 1}")
        base = base << bits | number
    return base << _COUNTER_BITS


@dataclass(slots=True)
class Episodes:
    """Episodes that ended while a batch was collected, in the order in which they ended."""

    returns: list[float] = field(default_factory=list)
    """Undiscounted sums of rewards."""
    lengths: list[int] = field(default_factory=list)
    """Frames."""
    num_terminated: int = 0
    """Those that the environment ended; the others were cut."""


class Trajectories:
    """The open trajectory of each of B environments."""

    def __init__(self, num_envs: int, base: int) -> None:
        self._next_id = base
        self._limit = base + (1 << _COUNTER_BITS)
        self.ids: Array = np.empty(num_envs, dtype=np.int64)
        """[B] int64, the id of the open trajectory."""
        self.lengths: Array = np.zeros(num_envs, dtype=np.int64)
        """[B] frames of the open trajectory so far."""
        self.returns: Array = np.zeros(num_envs, dtype=np.float64)
        """[B] undiscounted return of the open trajectory so far."""
        self.finished = Episodes()
        self.lost: set[int] = set()
        """Trajectories that a crash of their environment ended: no episodes."""
        self.open(slice(None))

    def open(self, columns: slice | Array) -> None:
        """Begin a new trajectory in each of the columns."""
        count = len(self.ids[columns])
        if self._next_id + count > self._limit:
            raise CormorantError(f"this worker has used up its 2^{_COUNTER_BITS} trajectory ids; restart it")
        self.ids[columns] = np.arange(self._next_id, self._next_id + count)
        self._next_id += count
        self.lengths[columns] = 0
        self.returns[columns] = 0.0

    def close(self, columns: Array, *, terminated: Array) -> None:
        """The trajectories of these columns ended: note the episodes, and begin new ones.

        Args:
            columns: [n] numbers of environments.
            terminated: [n] whether the environment ended it.
        """
        self.finished.num_terminated += int(np.count_nonzero(terminated))
        self.finished.returns.extend(self.returns[columns].tolist())
        self.finished.lengths.extend(self.lengths[columns].tolist())
        self.open(columns)

    def lose(self, columns: Array) -> None:
        """The environments of these columns crashed: their trajectories end, and new ones begin."""
        self.lost.update(self.ids[columns].tolist())
        self.open(columns)

    def take_finished(self) -> Episodes:
        """The episodes that ended since the last call."""
        finished, self.finished = self.finished, Episodes()
        return finished

    def state(self) -> dict[str, Array]:
        """What `restore` needs to go on with the same ids."""
        return {
            "next_id": np.array(self._next_id),
            "ids": self.ids.copy(),
            "lengths": self.lengths.copy(),
            "returns": self.returns.copy(),
        }

    def restore(self, state: dict[str, Array]) -> None:
        """Go on from `state()`, with the open trajectories that it held."""
        self._next_id = int(state["next_id"].item())  # an array of one: files know no scalars
        self._limit = (self._next_id >> _COUNTER_BITS << _COUNTER_BITS) + (1 << _COUNTER_BITS)
        self.ids[:] = state["ids"]
        self.lengths[:] = state["lengths"]
        self.returns[:] = state["returns"]
