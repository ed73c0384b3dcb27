"""A look through the eyes of one environment: asked of its worker, which answers beside its stepping.

Nothing is fetched of batches: they may lie on another node, or wait in a queue that nobody empties.
"""

import threading

import numpy as np

from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.quiesce import Quiesce
from cormorant_worker.fleet.worker_pool import WorkerPool
from cormorant_worker.spaces import Array

_TIMEOUT_S = 2.0
"""Somebody watches: the next look comes soon."""


class Eyes:
    """What environments of a fleet show. Methods may be called from any thread."""

    def __init__(self, changed: threading.Condition, crew: WorkerPool, standstill: Quiesce) -> None:
        """Take the fleet's parts; `changed` guards the others."""
        self._changed = changed
        self._crew = crew
        self._standstill = standstill

    def look(self, worker: str, *, column: int, leaf: int) -> Array:
        """What one environment shows now. Costs its worker a copy; paused ones answer, too.

        Args:
            worker: `<group>-<index>`.
            column: the environment, of the layout's B.
            leaf: the position of the array in the layout's observation.

        Returns:
            One leaf of the observation, in its own shape and dtype; read-only. In the moment in which a batch begins
            or ends it may be older than the newest, or of two rows.

        Raises:
            FleetError: no such worker has started, or it ended meanwhile.
            ControlTimeout: it did not answer within 2 s, for example because it is saving its state.
        """
        crew = self._crew
        with self._changed:
            crew.raise_error()
            member = next((m for m in crew.members.values() if m.name == worker and m.is_ready), None)
            if member is None or crew.ready is None:
                raise FleetError(f"worker {worker} has not started; look again when GET /v1/workers says it is ready")
            found = crew.ready.layout.observation[leaf]
            asked = {crew.request(member, "look", column=column, leaf=leaf): member}
            reply = self._standstill.answers(asked, "show its environment", timeout_s=_TIMEOUT_S).get(member.place)
            if reply is None:
                raise FleetError(f"worker {worker} ended before it showed its environment; its replacement will")
        return np.frombuffer(reply.state, found.dtype).reshape(found.shape)
