"""Weights that workers' pods kept from an earlier head, for a head that has none or older ones."""

import threading
from collections.abc import Mapping

from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.quiesce import Quiesce
from cormorant_worker.fleet.worker_pool import WorkerPool
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion

_TIMEOUT_S = 60.0
"""For the bytes of a policy from another node."""


class Inheritance:
    """What workers have to offer. Methods may be called from any thread."""

    def __init__(self, changed: threading.Condition, crew: WorkerPool, standstill: Quiesce) -> None:
        """Take the fleet's parts; `changed` guards the others."""
        self._changed = changed
        self._crew = crew
        self._standstill = standstill

    def versions(self) -> Mapping[str, PolicyVersion]:
        """The newest version that each worker's pod keeps and that was not fetched yet, by `<group>-<index>`."""
        with self._changed:
            members = self._crew.members.values()
            return {m.name: m.kept_version for m in members if m.is_synced and m.kept_version > INITIAL_VERSION}

    def fetch(self, worker: str) -> bytes:
        """What one worker's pod keeps, for `weights.cached.read_cached`. It is offered once.

        Raises:
            FleetError: no such worker works, or it ended meanwhile.
            ControlTimeout: it did not answer within 60 s.
            StateError: its disk failed.
        """
        crew = self._crew
        with self._changed:
            crew.raise_error()
            member = next((m for m in crew.members.values() if m.name == worker and m.is_synced), None)
            if member is None:
                raise FleetError(f"worker {worker} does not work now; its pod may offer its weights again")
            member.kept_version = INITIAL_VERSION
            asked = {crew.request(member, "kept"): member}
            reply = self._standstill.answers(asked, "hand over the weights that it kept", timeout_s=_TIMEOUT_S)
            if member.place not in reply:
                raise FleetError(f"worker {worker} ended before it handed over the weights that it kept")
        return reply[member.place].state
