"""A dataset's frames for torch's DataLoader, split among ranks and workers. Made by `Dataset.to_torch`."""

import os
from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict
from torch.utils.data import IterableDataset, get_worker_info

from cormorant_worker.errors import DatasetError


class FrameStream(IterableDataset[TensorDict]):
    """Iterates over this rank's share of a dataset; in a worker of a DataLoader, over the worker's share of that.
    Shares are ranges of the shards in an order that is equal on all ranks, so that few ranks read each shard.
    """

    def __init__(
        self,
        read: Callable[[int, int, tuple[int, ...] | None], Iterator[TensorDict]],
        frames: int,
        *,
        shuffle: bool,
        seed: int,
        ranks: tuple[int, int],
    ) -> None:
        """Use `Dataset.to_torch`. `read`: frames of a range, shuffled by these seeds; `frames`: how many are shared."""
        self._read, self._frames = read, frames
        self._shuffle, self._seed = shuffle, seed
        self._rank, self._world_size = ranks
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that persist see it change

    def set_epoch(self, epoch: int) -> None:
        """Choose another shuffle for the next pass. Call it on every rank before each epoch, with the same number."""
        self._epoch.fill_(epoch)

    @staticmethod
    def collate(batch: TensorDict) -> TensorDict:
        """`collate_fn` for DataLoader: its default would split a TensorDict."""
        return batch

    def __iter__(self) -> Iterator[TensorDict]:
        """Read this share from its beginning."""
        worker = get_worker_info()
        place, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        start, stop = _share(*_share(0, self._frames, self._rank, self._world_size), place, workers)
        return self._read(start, stop, (self._seed, int(self._epoch)) if self._shuffle else None)


def place_among_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process's rank and the number of ranks. Raises DatasetError."""
    if (rank is None) != (world_size is None):
        raise DatasetError(f"rank is {rank} and world_size is {world_size}; give both or neither")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            rank = int(os.environ["RANK"]) if world_size > 1 else 0
    if not 0 <= rank < world_size:
        raise DatasetError(f"there is no rank {rank} among {world_size}; ranks are numbered from 0")
    return rank, world_size


def _share(start: int, stop: int, place: int, places: int) -> tuple[int, int]:
    count = stop - start
    return start + count * place // places, start + count * (place + 1) // places
