"""The result of `open_fleet`: a `cormorant.Fleet` whose workers belong to this process."""

import _thread
import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from operator import index
from typing import TYPE_CHECKING, NoReturn, Self

from cormorant_contract.fleet import Batches, Fleet, Receipt, Shard, State, Stats, read_state
from cormorant_contract.job import CollectorJob
from cormorant_contract.weights import Publishable
from cormorant_worker.errors import BatchTimeout, ControlTimeout, FleetError, UpdateFailed
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.slot import WorkerStats
from cormorant_worker.normalize import StatisticsBook
from cormorant_worker.spaces import Space

if TYPE_CHECKING:
    from tensordict import TensorDict


class CurrentLoan:
    """The batch that a reader holds. Any request for the next one returns it."""

    def __init__(self) -> None:
        self._loan: Loan | None = None
        self._lock = threading.RLock()
        """Guards the loan: `close` may be called while another thread waits for a batch."""

    def swap(self, loan: Loan | None, *, only: Loan | None = None) -> None:
        """Acknowledge and return the current batch; with `only`, only if the current batch is `only`."""
        with self._lock:
            if only is not None and only is not self._loan:
                return
            last, self._loan = self._loan, loan
        if last is not None:
            last.acknowledge()
            last.release()

    def __del__(self) -> None:
        self.swap(None)  # a loop over a shard that was left holds up no other


class LocalBatches(Batches):
    def __init__(self, fleet: "LocalFleet", lent: CurrentLoan, *, copy: bool = False) -> None:
        self._owner = fleet
        self._lent = lent
        self._copy = copy
        self._loan: Loan | None = None
        self.num_frames = 0

    def next(self, timeout: float | None = None) -> "TensorDict | None":
        """Return the last batch's memory and wait for the next batch; None at the end."""
        fleet = self._owner._fleet
        self._lent.swap(None)
        try:
            loan = fleet.borrow(timeout_s=timeout)
        except ControlTimeout as error:
            raise BatchTimeout(str(error)) from None
        if loan is None:
            return None
        try:
            batch = loan.tensordict(copy=self._copy)
            if self._copy:
                loan.copied()  # until the next one is asked for, the learner is taken to work on it
        except BaseException:
            loan.release()
            raise
        # Only now: another thread that asks for a batch gives back what it finds here.
        self._loan = loan
        self._lent.swap(loan)
        self.num_frames += loan.num_frames
        return batch

    def __next__(self) -> "TensorDict":
        if (batch := self.next()) is None:
            raise StopIteration
        return batch

    def close(self) -> None:
        if self._loan is not None:
            self._lent.swap(None, only=self._loan)


class LocalShard(Shard):
    """One thread's part of the batches."""

    def __init__(self, fleet: "LocalFleet") -> None:
        self._owner = fleet

    def iter_batches(self, *, copy: bool = False) -> LocalBatches:
        """Iterate. Batches own their memory, with or without `copy`."""
        return LocalBatches(self._owner, CurrentLoan(), copy=True)


class FleetReceipt(Receipt):
    """Properties reflect the current state."""

    def __init__(self, fleet: "LocalFleet", version: int) -> None:
        self._owner = fleet
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    @property
    def applied(self) -> tuple[str, ...]:
        return self._owner._fleet.receipt(self.version).applied

    @property
    def waiting(self) -> tuple[str, ...]:
        return self._owner._fleet.receipt(self.version).waiting

    @property
    def refused(self) -> Mapping[str, str]:
        return self._owner._fleet.receipt(self.version).refused

    def wait(self, timeout: float = 30.0) -> Self:
        receipt = self._owner._fleet.receipt(self.version, wait_s=timeout)
        if receipt.refused:
            said = "; ".join(f"{worker}: {why}" for worker, why in sorted(receipt.refused.items())[:4])
            raise UpdateFailed(f"version {self.version} was refused: {said}")
        if receipt.waiting:
            raise UpdateFailed(
                f"version {self.version} is not with every worker after {timeout:g} s: {len(receipt.applied)} act "
                f"with it, {', '.join(receipt.waiting[:4])} do not; wait longer, or read batches: workers "
                "take it between two"
            )
        return self

    def __repr__(self) -> str:
        receipt = self._owner._fleet.receipt(self.version)
        return f"Receipt(version={self.version}, applied={receipt.applied}, waiting={receipt.waiting})"


def owned(fleet: WorkerFleet, owner: object) -> WorkerFleet:
    """The underlying fleet, closed when its owner is garbage-collected."""
    weakref.finalize(owner, _close_forgotten, fleet, os.getpid()).atexit = False
    return fleet


def _close_forgotten(fleet: WorkerFleet, pid: int) -> None:
    """Called by the garbage collector, in any thread, whose locks it must not wait for: starting this kind of thread
    takes none. A fork's copy has no workers.
    """
    if os.getpid() == pid:
        _thread.start_new_thread(fleet.close, ())


class LocalFleet(Fleet):
    """Workers that this process started, here or on a Ray cluster. They also end with the last reference to it."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self._workers, self._pid = fleet, os.getpid()
        self._lent = CurrentLoan()

    @property
    def _fleet(self) -> WorkerFleet:
        """Raise in a fork, which has a copy of the queue: its batches would be read twice, and none would follow."""
        if os.getpid() != self._pid:
            self.__reduce__()
        return self._workers

    def __reduce__(self) -> NoReturn:
        raise FleetError(
            "this fleet belongs to the process that opened it; serve the job (`cormorant run --serve`) and give other "
            "processes shards of connect(...).streaming_split(n)"
        )

    @property
    def job(self) -> CollectorJob:
        """The manifest; for a script, made from its arguments."""
        return self._fleet.job

    @property
    def spaces(self) -> tuple[Space, Space]:
        return self._fleet.spaces

    # -- batches -----------------------------------------------------------------------------------------------

    def batches(self, *, copy: bool = False) -> LocalBatches:
        """See `Fleet.batches`. Without `total_frames` iteration ends when the fleet is closed. Asking for a batch, in
        any iteration, invalidates views of the previous one.

        Raises:
            WorkerFailed: a worker failed for good.
            FleetClosed: the fleet was closed.
            FleetError: the manifest has no output.queue.
        """
        return LocalBatches(self, self._lent, copy=copy)

    def next_batch(self, timeout: float | None = None, *, copy: bool = False) -> "TensorDict | None":
        """See `Fleet.next_batch`. Raises the errors of `batches` as well."""
        return LocalBatches(self, self._lent, copy=copy).next(timeout)

    def streaming_split(self, n: int) -> tuple[LocalShard, ...]:
        """See `Fleet.streaming_split`; for threads of this process."""
        self._lent.swap(None)
        return tuple(LocalShard(self) for _ in range(n))

    # -- weights -----------------------------------------------------------------------------------------------

    def publish(self, weights: Publishable, *, version: int | None = None, wait: float = 0.0) -> FleetReceipt:
        """See `Fleet.publish`. Raises WeightsError for a version past 2**62 as well."""
        number = None if version is None else index(version)
        published = self._fleet.publish(weights, version=number, wait_s=wait)
        receipt = FleetReceipt(self, published.version)
        return receipt if published.applied or not wait else receipt.wait(0)

    @property
    def version(self) -> int:
        return self._fleet.version

    @property
    def statistics(self) -> StatisticsBook | None:
        return self._fleet.statistics

    # -- control -----------------------------------------------------------------------------------------------

    def pause(self) -> AbstractContextManager[object]:
        self._fleet.pause()
        held = ExitStack()
        held.callback(self._fleet.resume)
        return held

    def resume(self) -> None:
        self._fleet.resume()

    def state(self) -> bytes:
        """See `Fleet.state`. Raises ControlTimeout where the current batches do not end in time."""
        return self._fleet.state()

    def restore(self, state: State) -> None:
        """See `Fleet.restore`. A state that does not fit changes nothing; a worker that refuses its part is named."""
        self._fleet.restore(read_state(state))

    def seed(self, seed: int) -> tuple[str, ...]:
        """See `Fleet.seed`.

        Raises:
            FleetError: the seed is negative, or all frames are collected.
            WorkerFailed: environments cannot be built again.
            ControlTimeout: the current batches did not end in time.
        """
        return self._fleet.seed(seed)

    def resize(self, workers: int | Mapping[str, int], *, wait: bool = True) -> None:
        """Start workers, or retire those with the highest index after they finish their current work.

        Args:
            workers: number of workers in the fleet, or by group; groups that are not named keep their size.
            wait: return only after all of them have started or ended.

        Raises:
            FleetError: fewer than one worker, or no such group.
            WorkerFailed, ControlTimeout: new workers did not start.
        """
        self._fleet.resize(workers, wait=wait)

    # -- looking -----------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        return self._fleet.stats(workers=False).summary()

    def workers(self) -> tuple[WorkerStats, ...]:
        """Each worker."""
        return self._fleet.stats().workers

    def wait_until_done(self, timeout: float) -> bool:
        """For jobs with a dataset and no queue: wait until all frames are durable. False after `timeout` seconds."""
        return self._fleet.wait_until_done(timeout)

    # -- life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the current batches, close the datasets and stop the workers, within seconds. Batches in the queue are
        lost. May be called twice.
        """
        if os.getpid() == self._pid:
            self._lent.swap(None)
            self._fleet.close()
