"""The Ray fleet: the same fleet over actors of a Ray cluster. What pods run, and `cormorant ... --fleet ray`."""

from dataclasses import replace
from typing import Any

from cormorant_contract.job import CollectorJob
from cormorant_worker.fleet.fleet import Fleet
from cormorant_worker.fleet.options import FleetOptions, default_workers
from cormorant_worker.fleet.ray.connection import RayConnection
from cormorant_worker.fleet.ray.engine import RayEngine
from cormorant_worker.fleet.ray.options import RayOptions


class RayFleet(Fleet):
    """Collectors in actors of a Ray cluster. Use as a context manager; methods may be called from any thread."""

    def __init__(
        self, job: CollectorJob, options: FleetOptions | None = None, ray_options: RayOptions | None = None
    ) -> None:
        """Connect to the cluster or start one, start the workers, and wait for all of them; with `slot_resources`, for
        the first: the others begin as their pods come.

        Without `options.workers` there are as many as the manifest says; in a cluster of the fleet's own, at most one
        a processor.

        Raises:
            FleetError: the cluster cannot be reached or started, or its object store is too small.
            WorkerFailed, ControlTimeout: a worker cannot start, or was not placed in time; says what it asked for and
                what the cluster has.
            DatasetError: the manifest's dataset cannot be opened or belongs to another job.
        """
        options = options or FleetOptions()
        if ray_options is not None and ray_options.slot_resources:
            options = replace(options, waits_for_places=True)
        engine = RayEngine(ray_options or RayOptions())
        try:
            if not options.workers:
                options = replace(options, workers=default_workers(job, is_this_machine=engine.cluster.is_own))
            super().__init__(job, options, engine=engine)
        except BaseException:
            engine.close()
            raise

    @property
    def actors(self) -> tuple[Any, ...]:
        """Ray's handles of the workers that live now, in the order of their places."""
        with self._changed:
            links = [member.link for _, member in sorted(self._crew.members.items())]
        return tuple(link.handle for link in links if isinstance(link, RayConnection))
