"""EnvGroups around the collector's own, with something done after every vector step."""

from collections.abc import Callable
from typing import Any, cast

from cormorant_worker.collect.env_group import EnvGroup
from cormorant_worker.collect.timing import Laps


class WrappedEnvGroup:
    """Another group with a `land` of its own: what is not here is the other's."""

    def __init__(self, inner: EnvGroup) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def laps(self) -> Laps | None:
        return self.inner.laps

    @laps.setter
    def laps(self, laps: Laps | None) -> None:
        self.inner.laps = laps

    def as_group(self) -> EnvGroup:
        return cast(EnvGroup, self)


class WatchedEnvGroup(WrappedEnvGroup):
    """Calls a function after every vector step: for rendering."""

    def __init__(self, inner: EnvGroup, on_landed: Callable[[], None]) -> None:
        super().__init__(inner)
        self._on_landed = on_landed

    def land(self) -> int:
        landed = self.inner.land()
        self._on_landed()
        return landed
