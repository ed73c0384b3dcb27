"""A worker's batches, put into a replay buffer where the worker is."""

from tensordict import TensorDictBase

from cormorant_worker.batch import frames_of, to_tensordict
from cormorant_worker.block import Block
from cormorant_worker.torchrl.collector import split, truncate_last
from cormorant_worker.torchrl.settings import Settings


class StoreInBuffer:
    """Called in the worker with each batch; does with it what the collector would do here. Pickled for it."""

    def __init__(self, settings: Settings) -> None:
        self._buffer = settings.replay_buffer
        self._truncates = settings.set_truncated
        self._splits = settings.split_trajs
        self._postproc = settings.postproc

    def __call__(self, block: Block) -> None:
        """Store the batch."""
        batch: TensorDictBase = to_tensordict(block, copy=True)
        if self._truncates:
            truncate_last(batch)
        if self._splits:
            batch = split(batch)
        self._buffer.extend(frames_of(batch if self._postproc is None else self._postproc(batch)))
