"""What `open_fleet` gives: a fleet whose workers belong to this process, in the words of `cormorant.Fleet`."""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cormorant_contract.job import CollectorJob
from cormorant_contract.stats import Stats
from cormorant_worker.disk import write_durably
from cormorant_worker.errors import StateError, UpdateFailed
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.stats import WorkerStats
from cormorant_worker.normalize.book import StatisticsBook
from cormorant_worker.spaces import Space

if TYPE_CHECKING:
    from tensordict import TensorDict


class CurrentLoan:
    """The batch that a reader has. Asking for the next one, by any iteration, gives it back."""

    def __init__(self) -> None:
        self._loan: Loan | None = None
        self._lock = threading.Lock()
        """Guards the loan: `close` may be called while another thread waits for a batch."""

    def swap(self, loan: Loan | None, *, only: Loan | None = None) -> None:
        """Give the last one back. `only`: if it is this one."""
        with self._lock:
            if only is not None and only is not self._loan:
                return
            last, self._loan = self._loan, loan
        if last is not None:
            last.release()


class LocalBatches:
    """Batches one after the other, for `for` and `with`. One thread reads; several have `streaming_split`."""

    def __init__(self, fleet: WorkerFleet, lent: CurrentLoan, *, copy: bool = False) -> None:
        self._fleet = fleet
        self._lent = lent
        self._copy = copy
        self._loan: Loan | None = None
        self.num_frames = 0
        """Handed out so far."""

    def next(self, timeout: float | None = None) -> "TensorDict | None":
        """Give the last batch's memory back and wait for the next; None at the end."""
        self._lent.swap(None)
        self._loan = loan = self._fleet.borrow(timeout_s=timeout)
        if loan is None:
            return None
        self._lent.swap(loan)
        loan.acknowledge()
        batch = loan.tensordict(copy=self._copy)
        if self._copy:
            loan.copied()  # until the next one is asked for, the learner is taken to work on it
        self.num_frames += loan.num_frames
        return batch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> "TensorDict":
        if (batch := self.next()) is None:
            raise StopIteration
        return batch

    iter_batches = __iter__

    def close(self) -> None:
        """Give the last batch's memory back: its views end. May be called twice."""
        if self._loan is not None:
            self._lent.swap(None, only=self._loan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FleetReceipt:
    """What became of published weights; each look is at the moment."""

    def __init__(self, fleet: WorkerFleet, version: int) -> None:
        self._fleet = fleet
        self.version = version

    @property
    def applied(self) -> tuple[str, ...]:
        """Workers that act with this version or a newer one."""
        return self._fleet.receipt(self.version).applied

    @property
    def waiting(self) -> tuple[str, ...]:
        """Workers that have it staged for their next batch."""
        return self._fleet.receipt(self.version).waiting

    @property
    def refused(self) -> Mapping[str, str]:
        """Why workers refused it, by name."""
        return self._fleet.receipt(self.version).refused

    def wait(self, timeout: float = 30.0) -> Self:
        """Wait until every worker acts with this version or a newer one.

        Raises:
            UpdateFailed: a worker refused it, or not all act with it within `timeout` seconds; names them.
        """
        found = self._fleet.receipt(self.version, wait_s=timeout)
        if found.refused:
            said = "; ".join(f"{worker}: {why}" for worker, why in sorted(found.refused.items())[:4])
            raise UpdateFailed(f"version {self.version} was refused: {said}")
        if found.waiting:
            raise UpdateFailed(
                f"version {self.version} is not with every worker after {timeout:g} s: {len(found.applied)} act with "
                f"it, {', '.join(found.waiting[:4])} do not; wait longer, or read batches: workers take it between two"
            )
        return self

    def __repr__(self) -> str:
        found = self._fleet.receipt(self.version)
        return f"Receipt(version={self.version}, applied={found.applied}, waiting={found.waiting})"


class PausedFleet:
    """A pause that holds until `resume`, or to the end of a `with` block."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self._fleet = fleet

    def resume(self) -> None:
        self._fleet.resume()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()


class LocalFleet:
    """Workers of this process, here or on a Ray cluster. Close it, or use it as a context manager; methods may be
    called from any thread.
    """

    def __init__(self, fleet: WorkerFleet) -> None:
        self._fleet = fleet
        self._lent = CurrentLoan()

    @property
    def job(self) -> CollectorJob:
        """The manifest, also of a script."""
        return self._fleet.job

    @property
    def spaces(self) -> tuple[Space, Space]:
        """Observation and action space of one environment."""
        return self._fleet.spaces

    # -- batches -----------------------------------------------------------------------------------------------

    def batches(self, *, copy: bool = False) -> LocalBatches:
        """Batches until `total_frames` are delivered; without such a number, until the fleet is closed.

            for batch in fleet.batches():
                learn(batch)

        Args:
            copy: by default the tensors are views of shared memory, valid until the next batch is asked for; True makes
                them yours.

        Yields:
            TensorDict `[B, T]` in async mode, `[W*B, T]` in sync mode: TorchRL's keys; docs/reference/batches.md.

        Raises:
            WorkerFailed: a worker failed for good.
            FleetClosed: the fleet was closed meanwhile.
            FleetError: the manifest has no output.queue.
        """
        return LocalBatches(self._fleet, self._lent, copy=copy)

    def next_batch(self, timeout: float | None = None, *, copy: bool = False) -> "TensorDict | None":
        """The next batch, as `batches` yields it; None when all have been delivered.

            while (batch := fleet.next_batch(timeout=60)) is not None:
                learn(batch)

        Args:
            timeout: seconds; None waits as long as workers make progress (each of their waits is limited).
            copy: as in `batches`.

        Raises:
            ControlTimeout: no batch came in time; a TimeoutError.
            WorkerFailed, FleetClosed, FleetError: as `batches`.
        """
        return LocalBatches(self._fleet, self._lent, copy=copy).next(timeout)

    def streaming_split(self, n: int) -> tuple[LocalBatches, ...]:
        """Iterators for n threads of this process that learn side by side: each batch goes to exactly one of them, and
        lies in memory of its own. They may get different numbers of batches.
        """
        return tuple(LocalBatches(self._fleet, CurrentLoan(), copy=True) for _ in range(n))

    # -- weights -----------------------------------------------------------------------------------------------

    def publish(
        self,
        weights: Any,
        *,
        version: int | None = None,
        wait: float = 0.0,
        workers: Sequence[str] | None = None,
        allow_nonfinite: bool = False,
    ) -> FleetReceipt:
        """Hand new weights to every worker; each applies them at its next batch boundary, all of them or none.

        Args:
            weights: a torch module, its state dict, or a mapping of model names to either.
            version: higher than any before; None: the next number.
            wait: seconds to wait for every worker to act with them.
            workers: names of those that alone get them, and their replacements; None: all. `state()` holds what all
                have, and staleness is measured by it.
            allow_nonfinite: accept NaN and infinite values, as `policy.allowNonfinite` does for every publish.

        Raises:
            WeightsMismatch, NonfiniteWeights: the tensors do not fit the policy, or are not finite.
            StaleWeights: the version is not higher than the published one.
            WeightsError: these are no weights, or the version is past 2**62.
            FleetError: no such worker; nothing was published.
        """
        found = _state_dict(weights)
        if isinstance(found, Mapping):
            found = {name: _state_dict(value) for name, value in found.items()}
        receipt = self._fleet.publish(
            found, version=version, wait_s=wait, workers=workers or (), allow_nonfinite=allow_nonfinite
        )
        return FleetReceipt(self._fleet, receipt.version)

    @property
    def version(self) -> int:
        """The newest published version; 0: the initial weights act."""
        return self._fleet.version

    @property
    def statistics(self) -> StatisticsBook | None:
        """What each version acts with, for `cormorant.postproc.normalized`; None without `normalize`."""
        return self._fleet.statistics

    # -- control -----------------------------------------------------------------------------------------------

    def pause(self) -> PausedFleet:
        """Stop stepping at the next vector step of every worker; batches under way are kept and go on at `resume`.

            with fleet.pause():
                evaluate()

        Raises:
            ControlTimeout: a worker did not stop in time; the others stay paused.
        """
        self._fleet.pause()
        return PausedFleet(self._fleet)

    def resume(self) -> None:
        """Go on after `pause`. Does nothing when the fleet runs."""
        self._fleet.resume()

    def state(self) -> bytes:
        """Environments, generators, weights and the count of frames, at a batch boundary. Batches that are not taken
        yet are counted and not saved: pause before, and take them afterwards.

        Raises:
            ControlTimeout: batches under way did not end in time.
        """
        return self._fleet.state()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state()` to a file, whole or not at all: `open_fleet(..., resume=path)` goes on from it.

        Raises:
            StateError: the file cannot be written.
            ControlTimeout: as `state`.
        """
        state = self.state()
        try:
            write_durably(Path(path), state)
        except OSError as error:
            raise StateError(f"cannot write the state to {path}: {error.strerror or error}") from error

    def restore(self, state: bytes | memoryview | str | os.PathLike[str]) -> None:
        """Go on from what `state` returned or `save` wrote, of a fleet of the same job and as many workers.

        What this fleet has collected and was not taken is dropped. With a dataset, the count of frames stays that of
        the dataset.

        Raises:
            StateError: it cannot be read, or does not fit; nothing is changed unless a worker refuses, which its
                message names.
            WeightsMismatch: its weights do not fit the policy; nothing is changed.
        """
        if isinstance(state, str | os.PathLike):
            path = Path(state)
            try:
                state = path.read_bytes()
            except OSError as error:
                raise StateError(f"cannot read the state in {path}: {error.strerror or error}") from error
        self._fleet.restore(state)

    def seed(self, seed: int) -> tuple[str, ...]:
        """Reseed every worker at a batch boundary: with new environments and streams, as a new fleet with this seed
        would have. Weights, versions and the count of frames stay; open trajectories end. Returns the workers' names.

        Raises:
            FleetError: a negative seed, or everything is collected.
            WorkerFailed: environments cannot be built again.
            ControlTimeout: batches under way did not end in time.
        """
        return self._fleet.seed(seed)

    def resize(self, workers: int | Mapping[str, int], *, wait: bool = True) -> None:
        """Start workers, or retire those with the highest index: they finish what they hold first.

        Args:
            workers: of the whole fleet, or by group; groups that are not named keep their size.
            wait: until all of them have started or ended.

        Raises:
            FleetError: fewer than one worker, or no such group.
            WorkerFailed, ControlTimeout: new workers did not start.
        """
        self._fleet.resize(workers, wait=wait)

    # -- looking -----------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """How the fleet is doing; costs the same for any number of workers."""
        return self._fleet.stats(workers=False).summary()

    def workers(self) -> tuple[WorkerStats, ...]:
        """Each worker."""
        return self._fleet.stats().workers

    def wait_until_done(self, timeout: float) -> bool:
        """For jobs with a dataset and no queue: wait until all frames are durable. False after `timeout` seconds."""
        return self._fleet.wait_until_done(timeout)

    # -- life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let batches under way land, close the datasets, end the workers, within seconds. What was queued and not
        taken is given up. May be called twice.
        """
        self._lent.swap(None)
        self._fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _state_dict(weights: Any) -> Any:
    return weights.state_dict() if hasattr(weights, "state_dict") else weights
