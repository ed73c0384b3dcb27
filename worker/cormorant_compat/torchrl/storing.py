"""A worker's batches, put into a replay buffer where the worker is."""

from tensordict import TensorDictBase

from cormorant_compat.torchrl.batches import StepCounts, as_torchrls, split, truncate_last
from cormorant_compat.torchrl.settings import Settings, limit
from cormorant_worker.collect.batch import frames_of, to_tensordict
from cormorant_worker.collect.block import Block


class StoreInBuffer:
    """Called in the worker with each batch; does with it what the collector would do here. Pickled for it."""

    def __init__(self, settings: Settings) -> None:
        self._buffer = settings.replay_buffer
        self._truncates = settings.set_truncated
        self._splits = settings.split_trajs
        self._postproc = settings.postproc
        self._counts = StepCounts() if limit(settings.max_frames_per_traj) else None

    def __call__(self, block: Block) -> None:
        batch: TensorDictBase = to_tensordict(block, copy=True)
        as_torchrls(batch, self._counts, range(len(batch)))
        if self._truncates:
            truncate_last(batch)
        if self._splits:
            batch = split(batch)
        self._buffer.extend(frames_of(batch if self._postproc is None else self._postproc(batch)))
