"""What Ray costs: how fast batches go from an actor to a consumer on its node, and a Ray fleet against a local one.

The first figure is of the hand-over alone: the actor, its calls, the object store, the blocks in the fleet's process;
but for the environments, whose place is taken by a station that seals what lies in the block already. The second
alternates between two fleets of two workers each, one on either engine, the other one paused.
"""

import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import truediv
from statistics import median
from types import SimpleNamespace

import numpy as np
import ray

from benchmarks.micro import rows
from benchmarks.ours import make_job, open_local_fleet
from benchmarks.workloads import WORKLOADS
from cormorant_worker.collect.block import Layout
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.timing import BatchTiming
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions, RayOptions
from cormorant_worker.fleet.ray.actor import GROUPS, WorkerActor
from cormorant_worker.fleet.ray.cluster import RayCluster
from cormorant_worker.fleet.ray.engine import RayBlockPool, RayConnection, RayEngine
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.spaces import Leaf
from cormorant_worker.weights.cached import NOTHING_SETTLED
from cormorant_worker.worker.messages import Sealed, Ticket

STORE_BYTES = 1 << 30
BATCH_BYTES = 28_000_000
BATCHES = 20
"""A round's."""
ENVS, ROWS = 64, 15
WORKERS = 2


class SealingActor(WorkerActor):
    """A worker that seals at once whatever its blocks hold."""

    def _make_runtime(self, start: Layout) -> None:
        """It needs none."""

    def _run(self, start: Layout) -> None:
        while True:
            ticket: Ticket = self._uplink.recv()
            block = self._uplink.block(ticket, start)
            block.begin(start.num_rows)
            block.lengths[:] = start.num_rows
            self._uplink.send(
                Sealed(
                    number=ticket.number, num_frames=start.num_frames,
                    num_rows=start.num_rows, min_version=0, max_version=0,
                    timing=BatchTiming(seconds=0.0, env_step_s=0.0, inference_s=0.0),
                )
            )  # fmt: skip


class NumpyActor:
    """The least that can be done with Ray: bytes as one numpy array, two calls ahead."""

    def __init__(self) -> None:
        self._array = np.ones(BATCH_BYTES, np.uint8)

    @ray.method(concurrency_group="collect", num_returns=2)
    def collect(self, number: int) -> tuple[int, np.ndarray]:
        return number, self._array


def measure(*, quick: bool) -> Sequence[dict]:
    ours, bare = _hand_over_speeds(rounds=3 if quick else 15)
    ratio = _fleet_ratio(rounds=3 if quick else 12, seconds=2.0)
    note = "28 MB each"
    return [
        rows.row("batches to a Ray consumer on the same node", median(ours), "MB/s", bar=">= 3,500", note=note),
        rows.row("the same over a bare numpy actor", median(map(truediv, ours, bare)), "x", note=note),
        rows.row("Ray fleet over local fleet, 2 workers, Pong-64 CNN", ratio, "x", bar=">= 0.9"),
    ]


def _layout() -> Layout:
    pixels = BATCH_BYTES // (ENVS * (ROWS + 1))
    observation = Leaf(key=("observation",), shape=(pixels,), dtype=np.dtype(np.uint8))
    return Layout(
        num_rows=ROWS,
        num_envs=ENVS,
        observation=(observation,),
        action=(Leaf(key=("action",), shape=(), dtype=np.dtype(np.int64)),),
    )


def _hand_over_speeds(*, rounds: int) -> tuple[list[float], list[float]]:
    """MB/s of our actor and of a bare one, round by round."""
    cluster = RayCluster(RayOptions(init={"object_store_memory": STORE_BYTES}))
    layout = _layout()
    blocks = RayBlockPool(layout, 5, store_bytes=STORE_BYTES)
    handle = ray.remote(concurrency_groups=GROUPS)(SealingActor).options(num_cpus=0).remote(layout, [])
    engine = SimpleNamespace(cluster=cluster, blocks=blocks, settled=lambda: NOTHING_SETTLED)
    link = RayConnection(WorkerPlace(), handle, "", engine)
    try:
        ours, bare = _landed(link, blocks), _landed_bare()
        # Pages of the object store and of the actors' memory are touched for the first time.
        for _ in range(3):
            _speed(ours), _speed(bare)
        speeds = [(_speed(ours), _speed(bare)) for _ in range(rounds)]
        return [pair[0] for pair in speeds], [pair[1] for pair in speeds]
    finally:
        link.close()
        cluster.close()


def _speed(landed: Iterator[int]) -> float:
    start = time.perf_counter()
    size = sum(next(landed) for _ in range(BATCHES))
    return size / 1e6 / (time.perf_counter() - start)


def _landed_bare() -> Iterator[int]:
    actor = ray.remote(concurrency_groups=GROUPS)(NumpyActor).options(num_cpus=0).remote()
    under_way = [actor.collect.remote(number) for number in range(2)]
    while True:
        number, array = under_way.pop(0)
        ray.wait([array], timeout=60)
        yield ray.get(array).nbytes + 0 * ray.get(number)
        under_way.append(actor.collect.remote(number=0))


def _landed(link: RayConnection, blocks: RayBlockPool) -> Iterator[int]:
    """Bytes of each batch as it becomes readable here."""
    while True:
        while blocks.limit - blocks.room < 2:
            index = blocks.lend()
            ticket = Ticket(number=index, block_index=index, num_frames=0, version=0)
            link.send(ticket)
        (source,) = link.sources()
        if not select.select([source], [], [], 60.0)[0]:
            raise TimeoutError(f"no batch came within 60 s; the actor is {link.describe_doing()}")
        for message in link.receive(source):
            if isinstance(message, Sealed):
                block = blocks.block(message.number)
                size = sum(array.nbytes for array in block.used_arrays().values())
                blocks.give_back(message.number)
                yield size


def _fleet_ratio(*, rounds: int, seconds: float) -> float:
    job = make_job(WORKLOADS["pong-64"], workers=WORKERS)
    ray_fleet = WorkerFleet(
        job, FleetOptions(workers=WORKERS), engine=RayEngine(RayOptions(init={"object_store_memory": STORE_BYTES}))
    )
    with ray_fleet, open_local_fleet(job, workers=WORKERS) as local:
        local.pause()
        ray_fleet.pause()
        ratios = []
        for _ in range(rounds):
            on_local = _rate(local, seconds)
            ratios.append(_rate(ray_fleet, seconds) / on_local)
        return median(ratios)


def _rate(fleet: WorkerFleet, seconds: float) -> float:
    """Frames a second that a consumer gets, without what had been collected before."""
    with _running(fleet):
        batches = LocalFleet(fleet).batches()
        for _ in range(fleet.stats().queued_batches + 2 * WORKERS):
            next(batches)
        start = time.perf_counter()
        frames = 0
        while time.perf_counter() - start < seconds:
            frames += next(batches).numel()
        return frames / (time.perf_counter() - start)


@contextmanager
def _running(fleet: WorkerFleet) -> Iterator[None]:
    fleet.resume()
    yield
    fleet.pause()


if __name__ == "__main__":
    rows.main(measure)
