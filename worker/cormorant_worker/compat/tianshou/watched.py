"""EnvGroups around the collector's own, with something done after every vector step."""

from collections.abc import Callable

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.env_group import EnvGroup
from cormorant_worker.collect.timing import Laps
from cormorant_worker.policy.actor import Actor
from cormorant_worker.spaces import Array, Arrays


class LaneAround:
    """Hands everything on to another group. Implements EnvGroup."""

    def __init__(self, env_group: EnvGroup) -> None:
        self.inner = env_group
        self.env = env_group.env

    @property
    def laps(self) -> Laps | None:
        """What `act` and `land` are measured with, if they are."""
        return self.inner.laps

    @laps.setter
    def laps(self, laps: Laps | None) -> None:
        self.inner.laps = laps

    def start(self, initial_states: Arrays, layout: Layout) -> None:
        self.inner.start(initial_states, layout)

    def restart(self) -> None:
        """Begin a new trajectory everywhere, between batches."""
        self.inner.restart()

    def begin(self, block: Block, quota: Array) -> None:
        self.inner.begin(block, quota)

    @property
    def is_done(self) -> bool:
        """True when every column has its quota."""
        return self.inner.is_done

    def act(self, actor: Actor, version: int) -> None:
        """Decide and send the next actions."""
        self.inner.act(actor, version)

    def land(self) -> int:
        """Wait for what was sent and write it. Returns the number of frames."""
        return self.inner.land()

    def cut(self) -> None:
        self.inner.cut()

    def stop(self, columns: Array) -> None:
        """Accept what these columns have so far."""
        self.inner.stop(columns)

    def ends_ahead(self) -> list[tuple[int, int]]:
        """(column, frames up to and with it) of ends that are not handed over yet."""
        return self.inner.ends_ahead()

    @property
    def quota(self) -> Array:
        """[n] rows for each column."""
        return self.inner.quota

    def finish(self) -> None:
        """The block has what it wants."""
        self.inner.finish()

    def look(self, column: int, leaf: int) -> Array:
        """A copy of one leaf of what a column acts on next."""
        return self.inner.look(column, leaf)

    def state(self) -> dict[str, Array]:
        return self.inner.state()

    def restore(self, state: dict[str, Array]) -> None:
        self.inner.restore(state)


class WatchedEnvGroup(LaneAround):
    """Calls a function after every vector step: for rendering."""

    def __init__(self, env_group: EnvGroup, on_landed: Callable[[], None]) -> None:
        super().__init__(env_group)
        self._on_landed = on_landed

    def land(self) -> int:
        """Wait for what was sent, write it, and tell."""
        landed = self.inner.land()
        self._on_landed()
        return landed
