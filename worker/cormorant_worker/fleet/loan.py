"""A round that a consumer has borrowed: views of the workers' memory, until it is released; and one that it took."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cormorant_worker.collect.block import Block
from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.scheduler import Mode
from cormorant_worker.shared_memory import SharedMemory

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the consumer takes at once."""

    tensordict: "TensorDict"
    num_frames: int
    min_version: int
    """The oldest policy version that acted in it; -1 where only random actions did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoanPart:
    worker: str
    """`<group>-<index>`."""
    attempt: int
    block: Block
    """The arrays, with `num_rows` and `num_ends` of this batch."""
    memory: SharedMemory | None
    """What the block lies in from its first byte on; None where that is no shared memory of this machine."""


class Loan:
    """One round out of the queue. Use as a context manager, or call `release`; views are worthless afterwards."""

    def __init__(
        self,
        parts: tuple[LoanPart, ...],
        *,
        mode: Mode,
        num_frames: int,
        min_version: int,
        max_version: int,
        storing_device: str,
        on_copied: Callable[[], None],
        on_release: Callable[[], None],
        post_processing: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.parts = parts
        """In the order of the workers' places; exactly one in async mode."""
        self.mode = mode
        self.num_frames = num_frames
        self.min_version = min_version
        """The oldest policy version that acted; -1 where only random actions did."""
        self.max_version = max_version
        self.post_processing = dict(post_processing)
        """What `tensordict` makes of the frames; `parts` has them as they were collected."""
        self._storing_device = storing_device
        self._on_copied = on_copied
        self._on_release = on_release
        self._has_memory = True

    def tensordict(self, *, copy: bool = False) -> "TensorDict":
        """The batch, `[B, T]` in async mode, `[W*B, T]` in sync mode; see `batch.to_tensordict`. With `multiStep` and
        `splitTrajectories` in the manifest, what they make of it.

        Args:
            copy: make the tensors yours instead of views that `release` invalidates. Sync batches always are.

        Raises:
            FleetError: the loan was released.
        """
        # Whoever reads batches pays for tensordict's import, some seconds; `cormorant run` only counts them.
        from cormorant_worker.collect.batch import stack_workers, to_tensordict

        if not self._has_memory:
            raise FleetError("the batch was given back; call tensordict() before release()")
        is_stacked = self.mode == "sync"
        found = [to_tensordict(part.block, copy=copy and not is_stacked) for part in self.parts]
        whole = stack_workers(found) if is_stacked else found[0]
        placed = whole if self._storing_device == "cpu" else whole.to(self._storing_device)
        if not self.post_processing:
            return placed
        from cormorant_postproc.pipeline import of_collection

        return of_collection(self.post_processing)(placed)

    def copied(self) -> None:
        """Give the memory back early. Until `release` the fleet takes it that weights may still be made of this batch,
        which counts for `maxStaleness`.
        """
        self._has_memory = False
        self._on_copied()

    def release(self) -> None:
        """Give the batch back. May be called twice, and from any thread."""
        self._has_memory = False
        self._on_release()

    def __enter__(self) -> "Loan":
        """Use as a context manager to give the batch back."""
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
