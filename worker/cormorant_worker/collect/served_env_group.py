"""EnvGroups whose policy acts in an inference server: `act` hands the rows in, `land` takes the actions and steps.

With two groups, the rows of one are at the server while the environments of the other step.

# n columns of this group, k of them at a time
"""

from time import monotonic_ns
from typing import Any

import numpy as np
import torch

from cormorant_worker.collect.async_env_group import AsyncEnvGroup
from cormorant_worker.collect.env_group import LockstepEnvGroup
from cormorant_worker.inference.remote_actor import Asked, RemoteActor
from cormorant_worker.policy.actor import Acted, Actor
from cormorant_worker.spaces import Array, Arrays, Leaf


class _Answer:
    """An actor that decides what was decided elsewhere."""

    outputs: tuple[Leaf, ...] = ()
    states: tuple[Leaf, ...] = ()
    initial_states: Arrays = ()
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.acted = Acted(())

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        return self.acted


class ServedLockstepEnvGroup(LockstepEnvGroup):
    """Driven like a `LockstepEnvGroup`."""

    _asked: Asked | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answer = _Answer()

    def act(self, actor: Actor, version: int) -> None:
        """Hand in the rows of the columns that want more. Returns at once."""
        if not isinstance(actor, RemoteActor):
            super().act(actor, version)  # warm-up frames are drawn here
            return
        if self._is_dense and self._row < self._dense_rows:
            rows: int | Array = self._row
            columns: slice | Array = slice(None)
        else:
            if self._is_dense:
                self._become_uneven()
            columns = np.flatnonzero(self._cursor < self._quota)
            rows = self._cursor[columns]
        obs = tuple([a[rows, columns] for a in self._obs])
        states = tuple([a[rows, columns] for a in self._states])
        self._asked = actor.ask(obs, states, self.is_init[columns])

    def land(self) -> int:
        """Wait for the actions, send them, wait for the step and write it. Returns the number of frames."""
        if (asked := self._asked) is not None:
            self._asked = None
            began = monotonic_ns()
            self._answer.acted, version = asked.answer()
            if self.laps is not None:
                self.laps.inference_ns += monotonic_ns() - began
            super().act(self._answer, version)
        return super().land()


class ServedAsyncEnvGroup(AsyncEnvGroup):
    """Driven like an `AsyncEnvGroup`: while its rows are at the server, the environments that are under way step."""

    def act(self, actor: Actor, version: int) -> None:
        before = self._idle
        super().act(actor, version)
        if isinstance(actor, RemoteActor):
            columns = np.setdiff1d(before, self._idle)
            self._ring_version[self._landed[columns] % self._size, columns] = actor.acted_version
