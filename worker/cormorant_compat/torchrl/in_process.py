"""One collector in this process with the face of a fleet: TorchRL's `Collector`, whose policy is the learner's own.

Nothing is stepped between two batches. Used by one thread at a time.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.build import build_collector, rebuild
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.collect.pause_gate import Stopped
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import EnvRaised, FleetClosed, StateError
from cormorant_worker.fleet.batch_queue import Loan, LoanPart
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.slot import WorkerStats
from cormorant_worker.fleet.stats import FleetStats, WorkerReceipts
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.staged import PolicyVersion

_NAME = "local-0"
_STOP_S = 10.0


class InProcessFleet:
    """Collects each batch when it is asked for. Publishing copies weights into the policy, and counts a version."""

    def __init__(self, job: CollectorJob, parts: WorkerOverrides) -> None:
        """Build the environments and try the policy."""
        self.job = job
        self._parts = parts
        self._place = WorkerPlace(seed=job.spec.collection.seed)
        with _exceptions_of_environments():
            self._collector = build_collector(job, self._place, parts)
        num_envs = self._collector.num_envs
        self._steps = -(-job.spec.collection.frames_per_batch // num_envs)
        self._block = Block(self._collector.layout(self._steps))
        total = job.spec.collection.total_frames
        self._total = None if total is None else -(-total // num_envs) * num_envs
        self._frames = 0
        self._filling = threading.RLock()
        self._is_closed = False

    @property
    def layout(self) -> Layout:
        return self._collector.layout(self._steps)

    def borrow(self) -> Loan | None:
        """Collect the next batch; None when there is none left."""
        if self._is_closed:
            raise FleetClosed("the collector was shut down; make another one")
        left = None if self._total is None else self._total - self._frames
        if left == 0:
            return None
        num_frames = self._steps * self._collector.num_envs
        with self._filling, _exceptions_of_environments():
            try:
                filled = self._collector.fill(self._block, num_frames if left is None else min(num_frames, left))
            except Stopped:
                raise FleetClosed("the collector was shut down in the middle of a batch") from None
        self._frames += filled.num_frames
        return Loan(
            (LoanPart(worker=_NAME, attempt=0, block=self._block, memory=None),),
            num_frames=filled.num_frames,
            min_version=filled.version,
            max_version=filled.version,
        )

    def publish(
        self, weights: Mapping[str, Mapping[str, torch.Tensor]], *, workers: Sequence[str] = ()
    ) -> WorkerReceipts:
        del workers  # there is one
        slot = self._collector.weights
        version = PolicyVersion(slot.version + 1)
        slot.offer({model: dict(tensors) for model, tensors in weights.items()}, version=version)
        slot.apply()
        return self.receipt(slot.version)

    def receipt(self, version: int) -> WorkerReceipts:
        return WorkerReceipts(version=PolicyVersion(version), applied=(_NAME,), waiting=())

    def seed(self, seed: int) -> tuple[str, ...]:
        self._place = replace(self._place, seed=seed)
        with _exceptions_of_environments():
            rebuild(self._collector, self.job, self._place, self._parts)
        return (_NAME,)

    def restart(self) -> None:
        self._collector.restart()

    def pause(self) -> None:
        """Nothing is stepped between two batches."""

    def resume(self) -> None: ...

    def state(self) -> bytes:
        current = self._collector.weights.current()
        return FleetState(
            frames=self._frames,
            version=self._collector.weights.version,
            weights=bytes(WeightsBlob.of(current).buffer) if current else b"",
            attempts={_NAME: 0},
            seed=self._place.seed,
            workers={_NAME: self._collector.state()},
        ).to_bytes()

    def restore(self, state: bytes) -> None:
        saved = FleetState.from_bytes(state)
        if set(saved.workers) != {_NAME}:
            raise StateError(f"the state holds workers {sorted(saved.workers)}, this collector is {_NAME} alone")
        if saved.weights:
            self._collector.weights.load(WeightsBlob.from_bytes(saved.weights).weights())
            self._collector.weights.version = PolicyVersion(saved.version)
        self._collector.restore(bytes(saved.workers[_NAME]))
        self._frames = saved.frames

    def stats(self) -> FleetStats:
        version, collector = self._collector.weights.version, self._collector
        worker = WorkerStats(
            name=_NAME,
            attempt=0,
            phase="waiting",
            frames=self._frames,
            version=version,
            pid=os.getpid(),
            env_restarts=collector.env_restarts,
        )
        return FleetStats(
            frames=self._frames,
            settled_frames=self._frames,
            stepped_frames=self._frames,
            total_frames=self._total,
            version=version,
            workers=(worker,),
        )

    def close(self) -> None:
        self._is_closed = True
        self._collector.gate.stop()
        # Another thread ends its batch at the next vector step.
        has_ended = self._filling.acquire(timeout=_STOP_S)
        self._collector.close()
        if has_ended:
            self._filling.release()


@contextmanager
def _exceptions_of_environments() -> Iterator[None]:
    """Raise an environment's exception as the environment raised it."""
    try:
        yield
    except EnvRaised as error:
        if error.__cause__ is None:
            raise
        error.__cause__.add_note(str(error).partition("\n")[0])
        raise error.__cause__ from None
