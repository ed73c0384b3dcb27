"""Batches for what learners already have: a replay buffer, or a PyTorch DataLoader. torch is imported when used."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from cormorant_client.batch import Batch
from cormorant_client.batches import Batches

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch.utils.data import IterableDataset


class Buffer(Protocol):
    """What TorchRL's replay buffers can do."""

    def extend(self, data: Any, /) -> Any:
        """Add frames."""


class ReplayFeed:
    """Fills a replay buffer from a stream.

    feed = ReplayFeed(client.batches(), buffer)
    while feed.fill(4096):                     # frames; 0 at the end of the stream
        learn(buffer.sample(256))
    """

    def __init__(self, batches: Batches, buffer: Buffer, *, keep_time: bool = False) -> None:
        """Make a feed.

        Args:
            batches: closed by `close`.
            buffer: anything with `extend(tensordict)`.
            keep_time: add trajectories `[B, T]` as they are instead of single frames `[N]`, for buffers of slices
                whose padding is masked.
        """
        self._batches = batches
        self._buffer = buffer
        self._keep_time = keep_time
        self.num_frames = 0
        """Added so far."""

    def fill(self, num_frames: int = 1) -> int:
        """Add batches until at least so many frames came. Returns how many did; fewer only at the end."""
        added = 0
        while added < num_frames and (batch := next(self._batches, None)) is not None:
            # Buffers copy into their storage; what does not would keep views of memory that goes back.
            found = batch.tensordict(copy=batch.is_shared)
            self._buffer.extend(found if self._keep_time else frames_of(found))
            added += batch.num_frames
        self.num_frames += added
        return added

    def close(self) -> None:
        """Give back what was not acknowledged."""
        self._batches.close()

    def __enter__(self) -> "ReplayFeed":
        self._batches.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Acknowledge the last batch unless an error occurred, and close."""
        self._batches.__exit__(*error)


def frames_of(batch: "TensorDict") -> "TensorDict":
    """A batch `[B, T]` as its frames `[N]`: padding left out, and the mask with it."""
    flat = batch.reshape(-1)
    if ("collector", "mask") not in flat.keys(True):
        return flat
    return flat[flat["collector", "mask"]].exclude(("collector", "mask"))


def as_dataset(
    batches: Callable[[], Batches], *, transform: Callable[[Batch], Any] | None = None
) -> "IterableDataset[Any]":
    """Batches as a dataset for `DataLoader(dataset, batch_size=None)`; with workers, each is a consumer of its own.

        loader = DataLoader(as_dataset(lambda: connect(url, token=token).batches()), batch_size=None)

    Args:
        batches: called in the process that iterates, so that each has connections of its own.
        transform: what the loader yields for a batch; by default nested dicts of tensors that own their memory.
    """
    from torch.utils.data import IterableDataset

    class BatchDataset(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            with batches() as stream:
                for batch in stream:
                    yield (transform or _own_tensors)(batch)

    return BatchDataset()


def _own_tensors(batch: Batch) -> dict[str, Any]:
    import torch

    def owned(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: owned(value) if isinstance(value, dict) else torch.from_numpy(value).clone()
            for key, value in values.items()
        }

    return owned(batch.numpy())
