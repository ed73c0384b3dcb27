"""Rounds on loan: from the queue to a consumer, and their memory back to the workers."""

import threading
import time
from collections.abc import Callable

from cormorant_worker.errors import ControlTimeout, FleetClosed
from cormorant_worker.fleet.batch_queue import BatchQueue, Delivery
from cormorant_worker.fleet.loan import Loan, LoanPart
from cormorant_worker.fleet.scheduler import Scheduler
from cormorant_worker.fleet.worker_pool import WorkerPool


class Lending:
    """Hands rounds out. `borrow` may be called by any thread, and lets go of the fleet's condition while it waits."""

    def __init__(
        self,
        changed: threading.Condition,
        crew: WorkerPool,
        schedule: Scheduler,
        deliveries: BatchQueue,
        *,
        storing_device: str,
        wake: Callable[[], None],
    ) -> None:
        """Take the fleet's parts.

        Args:
            changed: guards the others, and is notified when they change.
            crew: the workers.
            schedule: how much may be collected, and which versions are too old.
            deliveries: what is collected.
            storing_device: torch device of the tensors that consumers get.
            wake: makes the fleet's thread look at once.
        """
        self._changed = changed
        self._crew = crew
        self._schedule = schedule
        self._deliveries = deliveries
        self._storing_device = storing_device
        self._wake = wake

    def borrow(self, *, timeout_s: float | None, is_over: Callable[[], bool]) -> Loan | None:
        """Wait for the next round.

        Args:
            timeout_s: how long; None: as long as workers make progress.
            is_over: True when nothing more will come.

        Raises:
            ControlTimeout: none came in time.
            WorkerFailed: a worker failed for good.
            FleetClosed: the fleet was closed meanwhile.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._crew.raise_error()
                if (delivery := self._take()) is not None:
                    self._crew.note_lent(delivery.num_frames, delivery.min_version)
                    return self._lend(delivery)
                if is_over():
                    return None
                if self._crew.is_closing:
                    raise FleetClosed("the fleet was closed")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise ControlTimeout(f"no batch came within {timeout_s} s; {self._crew.describe()}")
                with self._crew.tally.waiting():
                    self._changed.wait(left)

    def _take(self) -> Delivery | None:
        bound, waiting = self._schedule.max_staleness, self._deliveries.num_waiting
        oldest = None if bound is None else self._crew.shelf.common_version - bound
        delivery = self._deliveries.take(min_version=oldest)
        # Only for news: the fleet's thread notifies whoever waits at every turn.
        if self._deliveries.num_waiting != waiting:
            self._wake()
        return delivery

    def _lend(self, delivery: Delivery) -> Loan:
        number, blocks = delivery.round.number, self._deliveries.blocks
        assert blocks is not None
        parts = []
        for (group, index), part in delivery.parts:
            block = blocks.block(part.block_index)
            block.num_rows, block.num_ends = part.message.num_rows, part.message.num_ends
            parts.append(
                LoanPart(
                    worker=f"{group}-{index}", attempt=part.attempt, block=block, memory=blocks.memory(part.block_index)
                )
            )
        return Loan(
            tuple(parts),
            mode=self._schedule.mode,
            num_frames=delivery.num_frames,
            min_version=delivery.min_version,
            max_version=delivery.max_version,
            storing_device=self._storing_device,
            post_processing=self._crew.job.spec.collection.post_processing,
            on_copied=lambda: self._give_back(self._deliveries.copied, number),
            on_release=lambda: self._give_back(self._deliveries.release, number),
        )

    def _give_back(self, how: Callable[[int], None], number: int) -> None:
        with self._changed:
            how(number)
            self._wake()
