"""From sealed batches to the consumer: complete rounds, the bounded queue, loans, and dropped frames.

sealed -> (round complete) -> backlog -> accepted into the queue -> lent to a consumer -> blocks given back
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial, reduce
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from cormorant_worker.collect.block import Block
from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.events import Events
from cormorant_worker.fleet.scheduler import Mode, Round, Scheduler, SlotKey
from cormorant_worker.fleet.transport import BlockPool
from cormorant_worker.normalize import Document, Statistics, StatisticsBook
from cormorant_worker.weights.staged import RANDOM_VERSION
from cormorant_worker.wire import SharedMemory
from cormorant_worker.worker.messages import Sealed

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class LoanPart:
    worker: str
    """`<group>-<index>`."""
    attempt: int
    block: Block
    """The arrays, with `num_rows` and `num_ends` of this batch."""
    memory: SharedMemory | None
    """Shared memory that begins with the block; None if it is not shared memory of this machine."""
    block_index: int = 0
    """Index of the block in the pool."""
    handed_at: float = 0.0
    """Time at which the worker got its ticket, in monotonic seconds of the fleet's process; likewise `sealed_at`."""
    sealed_at: float = 0.0
    collect_s: float = 0.0


@dataclass(eq=False)
class Loan:
    """One complete round, in the queue or with a consumer. Leaving its context releases it, which invalidates views."""

    parts: tuple[LoanPart, ...]
    """In the order of the workers' slots; exactly one in async mode."""
    _: KW_ONLY
    mode: Mode = "async"
    num_frames: int
    min_version: int
    """Oldest policy version of the frames; -1 if all actions were random."""
    max_version: int
    number: int = 0
    """That of its round."""
    storing_device: str = "cpu"
    """Torch device of the tensors of `tensordict`."""
    on_copied: Callable[[], None] = lambda: None
    on_release: Callable[[], None] = lambda: None
    post_processing: Mapping[str, Any] = field(default_factory=dict)
    """Post-processing by `tensordict`; `parts` holds the frames as collected."""
    accepted_at: float = 0.0
    """Time at which it entered the queue, in monotonic seconds of the fleet's process."""
    moments: Statistics | None = None
    """Moments to merge into the job's statistics; None once merged."""
    book: StatisticsBook | None = None
    _has_memory: bool = field(default=True, init=False)

    def tensordict(self, *, copy: bool = False) -> "TensorDict":
        """The post-processed batch, `[B, T]` in async mode, `[W*B, T]` in sync mode; see `batch.to_tensordict`. `copy`:
        tensors own their memory and outlive `release`; those of sync batches always do. Raises FleetError after
        `release`.
        """
        # Importing tensordict takes seconds; `cormorant run` only counts batches and never needs it.
        from cormorant_worker.collect.batch import stack_workers, to_tensordict

        if not self._has_memory:
            raise FleetError("the batch was given back; call tensordict() before release()")
        is_stacked = self.mode == "sync"
        parts = [to_tensordict(part.block, copy=copy and not is_stacked) for part in self.parts]
        whole = stack_workers(parts) if is_stacked else parts[0]
        placed = whole if self.storing_device == "cpu" else whole.to(self.storing_device)
        if not self.post_processing:
            return placed
        from cormorant_postproc.steps import of_collection

        return of_collection(self.post_processing)(placed)

    @property
    def statistics(self) -> dict[int, Document]:
        """Normalization statistics of its versions, where the fleet still has them; empty without `normalize`."""
        return {} if self.book is None else self.book.between(self.min_version, self.max_version)

    def acknowledge(self) -> None:
        """Merge the batch into the job's statistics. May be called twice; one thread at a time."""
        moments, self.moments = self.moments, None
        if self.book is not None and moments is not None:
            self.book.merge(moments)

    def copied(self) -> None:
        """Return the memory early. Until `release` the learner counts as using it, for `maxStaleness`."""
        self._has_memory = False
        self.on_copied()

    def release(self) -> None:
        """Return the batch. May be called twice, and from any thread."""
        self._has_memory = False
        self.on_release()

    def __enter__(self) -> "Loan":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class BatchQueue:
    """Complete and open rounds, and counts of dropped frames. Guarded by the fleet's condition."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        capacity: int,
        drops_oldest: bool,
        has_dataset: bool = False,
        events: Events | None = None,
        statistics: StatisticsBook | None = None,
        storing_device: str = "cpu",
        post_processing: Mapping[str, Any] | None = None,
        changed: AbstractContextManager[object] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin empty. `changed`: the fleet's condition; `wake`: has its thread look."""
        self.blocks: BlockPool | None = None
        """The memory of batches; set once, when the first worker has told their layout."""
        self.is_on_demand = False
        """A round begins as soon as a consumer waits for it, also while others work on theirs."""
        self.num_asking = 0
        """Consumers that wait for a round."""
        self.has_lent = False
        self.dropped: dict[str, int] = {}
        """Frames that were stepped and never delivered, by reason."""
        self._scheduler = scheduler
        self._capacity = capacity
        """Rounds that the queue and the consumers hold at most; 0: no queue, the dataset takes all."""
        self._drops_oldest = drops_oldest
        """A full queue drops its oldest round instead of making workers wait."""
        self._has_dataset = has_dataset
        """Frames are durable, and count, whatever becomes of them in the queue."""
        self.backlog: list[tuple[int, Loan]] = []
        """Complete rounds that were not accepted yet, a heap by round: a short last round may lack a straggler that an
        earlier one still waits for."""
        self._queue: deque[Loan] = deque()
        self._lent: set[Loan] = set()
        """Rounds whose memory is with consumers."""
        self._at_work: set[Loan] = set()
        """Rounds that consumers are not done with: they may still publish for them."""
        self._events = events or Events()
        self._statistics = statistics
        """Gets the moments of batches that were acknowledged; without a queue, of those that were accepted."""
        self._storing_device, self._post_processing = storing_device, post_processing or {}
        self._changed, self._wake = changed or nullcontext(), wake

    # -- in ----------------------------------------------------------------------------------------------------

    def land(
        self,
        landed: Round,
        worker: SlotKey,
        sealed: Sealed,
        *,
        block_index: int,
        attempt: int = 0,
        handed_at: float = 0.0,
    ) -> list[SlotKey]:
        """Add the part of a round that a worker's attempt sealed into a block; its ticket was issued at `handed_at`, in
        monotonic seconds. Returns the workers that should seal their parts now.
        """
        assert self.blocks is not None
        block = self.blocks.block(block_index)
        block.num_rows, block.num_ends = sealed.num_rows, sealed.num_ends
        part = LoanPart(
            worker=f"{worker[0]}-{worker[1]}",
            attempt=attempt,
            block=block,
            memory=self.blocks.memory(block_index),
            block_index=block_index,
            handed_at=handed_at,
            sealed_at=time.monotonic(),
            collect_s=sealed.timing.seconds,
        )
        self._scheduler.landed(landed, worker, sealed.num_frames, (part, sealed))
        late = [] if landed.is_complete else self._scheduler.preempt(landed)
        if landed.is_complete:  # or is it now: a preempted round does not wait for parts that were lost before
            self.complete([landed])
        return late

    def complete(self, rounds: Iterable[Round]) -> None:
        """Mark rounds that no longer wait for any worker."""
        for complete in rounds:
            heappush(self.backlog, (complete.number, self._loan_of(complete)))

    def _loan_of(self, round_: Round) -> Loan:
        """The parts of a round that have landed, in the order of the workers' slots."""
        landed: list[tuple[LoanPart, Sealed]] = [part for _, part in sorted(round_.landed.items())]
        acted = [sealed.min_version for _, sealed in landed if sealed.min_version != RANDOM_VERSION]
        moments = [sealed.moments for _, sealed in landed if sealed.moments is not None]
        return Loan(
            tuple(part for part, _ in landed),
            mode=self._scheduler.mode,
            num_frames=sum(sealed.num_frames for _, sealed in landed),
            min_version=min(acted, default=RANDOM_VERSION),
            max_version=max(sealed.max_version for _, sealed in landed),
            number=round_.number,
            storing_device=self._storing_device,
            post_processing=self._post_processing,
            moments=reduce(Statistics.merged, moments) if moments else None,
            book=self._statistics,
        )

    def accept(self) -> None:
        """Move complete rounds into the queue while it has room; their frames count from now on."""
        while self.backlog and not self._scheduler.waits_for_earlier(self.backlog[0][0]):
            # A consumer at work does not make workers wait where the oldest may be dropped.
            held = len(self._queue) + (0 if self._drops_oldest else len(self._lent))
            if self._capacity and held >= self._capacity and not self._make_room():
                return
            number, loan = heappop(self.backlog)
            loan.accepted_at = time.monotonic()
            self._scheduler.accepted(number)
            self._events.note("accepted", frames=loan.num_frames, version=loan.min_version)
            if self._capacity:
                self._queue.append(loan)
            else:
                loan.acknowledge()
                self._give_back(loan)

    # -- out ---------------------------------------------------------------------------------------------------

    def take(self, *, min_version: int | None) -> Loan | None:
        """Lend the oldest round; None: no round. Staler ones than `min_version` are dropped and collected again."""
        while self._queue:
            loan = self._queue.popleft()
            if min_version is not None and 0 <= loan.min_version < min_version:
                self._drop(loan, "stale")
                if not self._has_dataset:
                    self._scheduler.accepted_frames -= loan.num_frames
                continue
            self.has_lent = True
            self._lent.add(loan)
            self._at_work.add(loan)
            loan.on_copied, loan.on_release = partial(self._copied, loan), partial(self._release, loan)
            return loan
        return None

    def _copied(self, loan: Loan) -> None:
        with self._changed:
            if loan in self._lent:
                self._lent.discard(loan)
                self._give_back(loan)
            self._wake()

    def _release(self, loan: Loan) -> None:
        with self._changed:
            self._at_work.discard(loan)
            self._copied(loan)

    def discard(self, reason: str) -> None:
        """Drop every round that no consumer holds. No ticket may be out."""
        incomplete = [self._loan_of(round_) for round_ in self._scheduler.forget_open() if round_.landed]
        for loan in (*self._queue, *(loan for _, loan in self.backlog), *incomplete):
            self._drop(loan, reason)
        self._queue.clear()
        self.backlog.clear()

    def forget_moments(self) -> None:
        """Called when the job's statistics are replaced: batches of consumers no longer count in them."""
        for loan in self._at_work:
            loan.moments = None

    # -- room --------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self.backlog)

    @property
    def unsettled_frames(self) -> int:
        """Number of counted frames that would be lost with this process: in the queue, or with a consumer."""
        if self._has_dataset:
            return 0
        return sum(loan.num_frames for loan in (*self._queue, *self._at_work))

    @property
    def ahead_of_consumer(self) -> int:
        """Number of rounds that consumers see before one that begins now: those in the queue, and those in use."""
        if self.is_on_demand and self.num_asking > len(self._queue):
            return 0
        return len(self._queue) + len(self._at_work)

    @property
    def room(self) -> int:
        """Number of blocks that can be lent now, including those that dropping rounds would free."""
        if self.blocks is None:
            return 0
        droppable = sum(len(loan.parts) for loan in self._queue) if self._drops_oldest else 0
        return self.blocks.room + droppable

    @property
    def is_full(self) -> bool:
        """True while workers wait for a block."""
        return self.blocks is not None and not self.room

    def free_a_block(self) -> None:
        """Drop rounds, if necessary, until a block can be lent."""
        assert self.blocks is not None
        while not self.blocks.room and self._make_room():
            pass  # each turn drops one round

    def count_dropped(self, reason: str, num_frames: int) -> None:
        """Count frames that were stepped and will not be delivered."""
        if num_frames > 0:
            self.dropped[reason] = self.dropped.get(reason, 0) + num_frames
            self._events.note("dropped", frames=num_frames, reason=reason)

    def _make_room(self) -> bool:
        if not self._drops_oldest or not self._queue:
            return False
        self._drop(self._queue.popleft(), "drop_oldest")
        return True

    def _drop(self, loan: Loan, reason: str) -> None:
        self._give_back(loan)
        self.count_dropped(reason, loan.num_frames)

    def _give_back(self, loan: Loan) -> None:
        assert self.blocks is not None
        for part in loan.parts:
            self.blocks.give_back(part.block_index)
