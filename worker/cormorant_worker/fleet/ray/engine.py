"""The engine of a Ray cluster: worker actors, batches in the object store.

Results arrive in Ray's threads, which only put them into the inbox. The fleet's thread handles them.
"""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import ray

from cormorant_contract.job import CollectorJob
from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.errors import FleetError, ManifestError
from cormorant_worker.fleet.connections import Waker
from cormorant_worker.fleet.options import FleetOptions, RayOptions, default_workers
from cormorant_worker.fleet.ray.actor import GROUPS, News, WorkerActor
from cormorant_worker.fleet.ray.cluster import RayCluster
from cormorant_worker.fleet.transport import Payload, Source
from cormorant_worker.spaces import Array, writable
from cormorant_worker.weights.cached import NOTHING_SETTLED, Settled
from cormorant_worker.wire import SharedMemory
from cormorant_worker.worker.heartbeat import Phase
from cormorant_worker.worker.messages import Failed, Finished, Request, Start, Ticket

_GPU = "nvidia.com/gpu"
_SILENT_S = 10.0
"""Without a heartbeat, after which a worker cannot be taken to be waiting."""
_USABLE = 0.8
"""Share of the object store for batches: the rest is for weights and for objects that are being freed."""


class RayBlockPool:
    """The memory of batches: objects in Ray's store, mapped without copies. At most `limit` blocks, counting those that
    workers fill or have filled, and those that consumers hold.
    """

    def __init__(self, layout: Layout, limit: int, *, store_bytes: int) -> None:
        self._layout = layout
        self._store_bytes = store_bytes
        self._next = 0
        self._lent: dict[int, Block | None] = {}
        self.limit = 0
        self.resize(limit, at_least=1)

    def resize(self, limit: int, *, at_least: int) -> None:
        size_bytes = self._layout.size_bytes
        most = int(_USABLE * self._store_bytes) // size_bytes
        if most < at_least:
            raise FleetError(
                f"Ray's object store has {self._store_bytes:,} bytes on a node, a batch takes up to {size_bytes:,} "
                f"and {at_least} of them must fit into {_USABLE:.0%} of it; give it more memory "
                "(`ray start --object-store-memory`, or object_store_memory in RayOptions.init) or lower framesPerBatch"
            )
        self.limit = min(limit, most)

    @property
    def room(self) -> int:
        return max(0, self.limit - len(self._lent))

    def lend(self) -> int:
        if not self.room:
            raise FleetError(f"all {self.limit} batch slots are in use")
        self._next += 1
        self._lent[self._next] = None
        return self._next

    def land(self, block_index: int, arrays: Mapping[str, Array], *, num_rows: int, num_ends: int) -> None:
        """Add a ticket's arrays, which are mapped in this process."""
        block = Block(self._layout, arrays={name: writable(array) for name, array in arrays.items()})
        block.num_rows, block.num_ends = num_rows, num_ends
        self._lent[block_index] = block

    def give_back(self, block_index: int) -> None:
        self._lent.pop(block_index, None)  # the object goes with the last view of it; the pool may be closed

    def block(self, block_index: int) -> Block:
        block = self._lent[block_index]
        assert block is not None, block_index
        return block

    def memory(self, block_index: int) -> None:
        return None  # the object store's memory is Ray's

    def close(self) -> None:
        self._lent.clear()


class RayConnection:
    def __init__(self, place: WorkerPlace, handle: Any, demand: str, engine: "RayEngine") -> None:
        """Listen to an actor that was just asked for. `demand`: what it asks Ray for, in words."""
        self.place = place
        self.pid = 0
        self.frames = 0
        self.spent_ns = (0,) * len(ACTIVITIES)
        self.is_open = True
        self._phase = Phase.IMPORTING
        self.handle = handle
        self._demand, self._engine = demand, engine
        self._node_id = ""
        self._turns = count()
        self._batches: deque[tuple[Ticket, Any, Future[Any]]] = deque()
        """Tickets on their way; references to what was sealed and its arrays, kept until these are mapped here; and
        both, once they are local."""
        self._news = Waker()
        """Set while something is in the inbox."""
        self._inbox: deque[Future[Any]] = deque()
        self._last_heartbeat = time.monotonic()
        self._landed_frames = 0
        self._end = ""
        self._is_dead = False
        """Ray says so: the process id may be another's by now."""
        self._expect(self.handle.listen.remote(engine.settled()))

    # -- what is known -----------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The worker's phase as of its last heartbeat; without a heartbeat it does not count as waiting."""
        is_silent = time.monotonic() - self._last_heartbeat > _SILENT_S
        return Phase.STEPPING if is_silent and self._phase in (Phase.WAITING, Phase.STORING) else self._phase

    def describe_doing(self) -> str:
        """The worker's activity in words; before it has begun, the likely reason."""
        if self.pid:
            return self.phase.name.lower()
        return f"not placed: it asks Ray for {self._demand}; `ray status` shows what is free"

    def describe_end(self) -> str:
        return f"was lost while {self._phase.name.lower()} ({self._end or 'Ray does not say why'})"

    # -- listening ---------------------------------------------------------------------------------------------

    def sources(self) -> Sequence[Source]:
        return (self._news,)

    def flush(self) -> Sequence[Source]:
        """Has no effect: Ray queues the few calls that an actor has not taken (one offer, two tickets)."""
        return ()

    def receive(self, source: Source) -> Sequence[object]:
        """Messages that have arrived, batches in the order of their tickets."""
        self._news.clear()
        messages: list[object] = []
        while self.is_open and self._batches and self._batches[0][-1].done() and self._next_error() is None:
            ticket, _, batch = self._batches.popleft()
            sealed, arrays = batch.result()
            assert self._engine.blocks is not None, "no ticket goes out before the memory was laid out"
            self._engine.blocks.land(ticket.block_index, arrays, num_rows=sealed.num_rows, num_ends=sealed.num_ends)
            self._landed_frames += sealed.num_frames
            self.frames = max(self.frames, self._landed_frames)  # the heartbeat comes later than the batch
            messages.append(sealed)
        while self.is_open and self._inbox:
            result = self._inbox.popleft()
            if (error := result.exception()) is not None:
                self._lose(error)
                break
            news: News = result.result()
            if news.is_from_listen:
                self._expect(self.handle.listen.remote(self._engine.settled()))
            self._last_heartbeat = time.monotonic()
            self.pid, self._node_id, self._phase = news.pid, news.node_id, news.phase
            self.frames, self.spent_ns = max(self.frames, news.frames), news.spent_ns
            for message in news.messages:
                messages.append(message)
                if isinstance(message, Finished | Failed):
                    self.is_open = False
        # Last: what the worker itself has said of its end tells more.
        if self.is_open and (error := self._next_error()) is not None:
            self._lose(error)
        return messages

    def _next_error(self) -> BaseException | None:
        """Why the oldest ticket's batch does not come, whatever Ray says of it; None: it is here, or may come."""
        result = self._batches[0][-1] if self._batches else None
        return result.exception() if result is not None and result.done() else None

    def _lose(self, error: BaseException) -> None:
        """The actor, its node or an object is gone: whatever it was, its tickets are collected again."""
        self.is_open = False
        self._is_dead = isinstance(error, ray.exceptions.ActorDiedError)
        self._end = _cause(error)

    # -- talking -----------------------------------------------------------------------------------------------

    def send(self, message: object, memory: SharedMemory | None = None) -> None:
        if isinstance(message, Ticket):
            collected = self.handle.collect.remote(next(self._turns), message)
            self._batches.append((message, collected, result := collected.future()))
            result.add_done_callback(lambda _: self._news.wake())
        else:  # other calls detect an actor that is gone
            self.handle.tell.remote(next(self._turns), message, self._engine.settled())

    def ask(self, request: Request, payload: Payload | None) -> None:
        self._expect(self.handle.answer.remote(request, [] if payload is None else [payload]))

    def _expect(self, reference: Any) -> None:
        def arrived(result: "Future[Any]") -> None:
            self._inbox.append(result)
            self._news.wake()

        reference.future().add_done_callback(arrived)

    # -- ending ------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.handle, no_restart=True)
        # A stopped process hears no Ray; one on this machine can be ended for certain.
        if self.pid and self._node_id == self._engine.cluster.node_id and not self._is_dead:
            self._is_dead = True
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.is_open = False
        self.kill()
        self._news.close()
        self._inbox.clear()
        self._batches.clear()


def _cause(error: BaseException) -> str:
    """The telling sentence of one of Ray's long messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("The actor is dead because")]
    first = told[0] if told else (lines[0] if lines else type(error).__name__)
    return f"{type(error).__name__}: {first.split(' Some common causes', maxsplit=1)[0]}"


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
        self.blocks: RayBlockPool | None = None
        """Memory for the arrays that arrive, once it is laid out."""
        self._connections: dict[tuple[str, int], RayConnection] = {}
        """The newest of each slot."""
        self.settled: Callable[[], Settled] = lambda: NOTHING_SETTLED  # until `complete`
        """The count of settled frames, which the pods of workers keep for the next head."""

    def complete(self, job: CollectorJob, options: FleetOptions) -> FleetOptions:
        """The manifest's number of workers unless given; in the fleet's own cluster, at most one per processor. With
        `slot_resources`, pods provide the slots. Devices of other machines are unknown: a worker that finds none says
        so.
        """
        self.settled = lambda: Settled(epoch=options.epoch, frames=options.settled_frames())
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
        demand = ", ".join(f"{name} {n:g}" for name, n in {"CPU": cpus, "GPU": asked["num_gpus"], **resources}.items())
        connection = self._connections[place.group, place.index] = RayConnection(place, handle, demand, self)
        return connection

    def device_of(self, device: str, number: int) -> str:
        return device  # Ray shows each actor its own devices

    def cpus_for(self, num_workers: int) -> int:
        return max(1, available_cpus() // num_workers) if self.cluster.is_own else 0

    def make_blocks(self, layout: Layout, limit: int) -> RayBlockPool:
        self.blocks = RayBlockPool(layout, limit, store_bytes=self.cluster.store_bytes())
        return self.blocks

    def share(self, data: bytes | memoryview | SharedMemory) -> Payload:
        """A reference to bytes in the object store."""
        buffer = data.buffer if isinstance(data, SharedMemory) else data
        return ray.put(np.frombuffer(buffer, dtype=np.uint8))

    def close(self) -> None:
        if self.blocks is not None:  # also of a fleet that could not begin
            self.blocks.close()
        self.cluster.close()


def actor_options(job: CollectorJob, place: WorkerPlace, options: RayOptions, *, is_own: bool) -> dict[str, Any]:
    """Options of a worker's actor for `ray.remote`. `is_own`: only this fleet uses the cluster, so CPUs need no
    accounting.
    """
    group = next(known for known in job.spec.worker_groups if known.name == place.group)
    cpus, gpus = _quantity(group.resources, "cpu"), _quantity(group.resources, _GPU)
    if gpus is None:
        gpus = float(place.device.startswith("cuda"))
    slot: dict[str, float] = {}
    if options.slot_resources:
        # The slot is a whole pod: Kubernetes has counted its CPUs and devices, and all of them are this worker's.
        cpus, gpus, slot = 0.0, 0.0, {f"slot:{place.group}-{place.index}": 1.0}
    elif is_own:
        cpus = 0.0
    own = dict(options.actors[place.index]) if place.index < len(options.actors) else {}
    asked_cpus = options.num_cpus if options.num_cpus is not None else 1.0 if cpus is None else cpus
    return {
        **own,
        "num_cpus": asked_cpus if is_own else own.get("num_cpus", asked_cpus),
        "num_gpus": own.get("num_gpus", gpus if options.num_gpus is None else options.num_gpus),
        "resources": {**options.resources, **slot, **own.get("resources", {})},
    }


def _quantity(resources: Mapping[str, Any], name: str) -> float | None:
    """A Kubernetes quantity of whole or milli units, from the requests or else the limits."""
    value = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.get(name)
    if value is None:
        return None
    text = str(value)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
