"""The engine of a Ray cluster: worker actors, batches in the object store."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Layout
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.errors import ManifestError
from cormorant_worker.fleet.options import FleetOptions, default_workers
from cormorant_worker.fleet.ray.actor import GROUPS, WorkerActor
from cormorant_worker.fleet.ray.cluster import RayCluster
from cormorant_worker.fleet.ray.connection import ObjectPayload, RayBlockPool, RayConnection
from cormorant_worker.fleet.ray.options import RayOptions, actor_options, describe_resources
from cormorant_worker.weights.cached import NOTHING_SETTLED, Settled
from cormorant_worker.wire import SharedMemory
from cormorant_worker.worker.messages import Start


class RayEngine:
    """Requests actors from a cluster, one per worker. The fleet restarts them, not Ray, with new seeds."""

    descriptors_each = 4
    """Descriptors of Ray's connections to the actor and its node, and of notifications."""

    def __init__(self, options: RayOptions | None = None) -> None:
        self._options = options = RayOptions() if options is None else options
        if not isinstance(options, RayOptions):
            raise ManifestError(f"engine is {options!r}; give cormorant.RayOptions(), or None for this machine")
        self.cluster = RayCluster(options)
        self._actors: Any = ray.remote(concurrency_groups=GROUPS)(WorkerActor)
        self._blocks: RayBlockPool | None = None
        self._connections: dict[tuple[str, int], RayConnection] = {}
        """The newest of each slot."""
        self._settled: Callable[[], Settled] = lambda: NOTHING_SETTLED  # until `complete`

    def complete(self, job: CollectorJob, options: FleetOptions) -> FleetOptions:
        """The manifest's number of workers unless given; in the fleet's own cluster, at most one per processor. With
        `slot_resources`, pods provide the slots. Devices of other machines are unknown: a worker that finds none says
        so.
        """
        self._settled = lambda: Settled(epoch=options.epoch, frames=options.settled_frames())
        workers = options.workers or default_workers(job, is_this_machine=self.cluster.is_own)
        waits_for_places = options.waits_for_places or self._options.slot_resources
        return replace(options, workers=workers, waits_for_places=waits_for_places)

    @property
    def actors(self) -> tuple[Any, ...]:
        """Ray's handles of the running workers, in the order of their slots."""
        living = [slot for slot, known in tuple(self._connections.items()) if known.is_open]
        return tuple(self._connections[slot].handle for slot in sorted(living))

    def start(self, start: Start) -> RayConnection:
        """Request an actor, placed when the cluster has its resources. Raises FleetError without its own node."""
        self.cluster.check()
        place = start.place
        asked = actor_options(start.job, place, self._options, is_own=self.cluster.is_own)
        cpus, resources = asked["num_cpus"], asked["resources"]
        if cpus >= 1:
            place = replace(place, max_threads=int(cpus))
        runtime_env = None if self.cluster.has_connected else dict(self._options.runtime_env) or None
        asked = {"runtime_env": runtime_env, **asked, "resources": resources or None}
        handle = self._actors.options(**asked, max_restarts=0, max_task_retries=0).remote(
            replace(start, place=place), [path for path in sys.path if path]
        )
        demand = describe_resources({"CPU": cpus, "GPU": asked["num_gpus"], **resources})
        connection = self._connections[place.group, place.index] = RayConnection(
            place, handle, demand, cluster=self.cluster, blocks=self._landing, settled=self._settled
        )
        return connection

    def device_of(self, device: str, number: int) -> str:
        return device  # Ray shows each actor its own devices

    def cpus_for(self, num_workers: int) -> int:
        return max(1, available_cpus() // num_workers) if self.cluster.is_own else 0

    def make_blocks(self, layout: Layout, limit: int) -> RayBlockPool:
        self._blocks = RayBlockPool(layout, limit, store_bytes=self.cluster.store_bytes())
        return self._blocks

    def share(self, data: bytes | memoryview | SharedMemory) -> ObjectPayload:
        buffer = data.buffer if isinstance(data, SharedMemory) else data
        array = np.frombuffer(buffer, dtype=np.uint8)
        return ObjectPayload(ray.put(array), array.nbytes)

    def close(self) -> None:
        if self._blocks is not None:  # also of a fleet that could not begin
            self._blocks.close()
        self.cluster.close()

    def _landing(self) -> RayBlockPool:
        assert self._blocks is not None, "no ticket goes out before the memory was laid out"
        return self._blocks
