"""Post-processing of batches: functions of TensorDicts, vectorized, on the CPU and on the GPU.

    from cormorant_postproc import MultiStep, split_trajectories

    batch = MultiStep(gamma=0.99, n_steps=3)(batch)     # [B, T]
    padded = split_trajectories(batch)                  # [N, longest], masked
    buffer.extend(frames_of(batch))                     # [N], for a replay buffer

Called by learners, by collectors with a `postproc` argument, and for manifests with `multiStep`,
`splitTrajectories` or `bfloat16`. Each callable takes a batch and returns a new one; nothing is changed in place.
"""

from cormorant_postproc.normalize import normalized
from cormorant_postproc.pieces import Postproc, PostprocError, frames_of, split_trajectories
from cormorant_postproc.steps import FrameStack, MultiStep, Pipeline, RewardClip

__all__ = [
    "FrameStack",
    "MultiStep",
    "Pipeline",
    "Postproc",
    "PostprocError",
    "RewardClip",
    "frames_of",
    "normalized",
    "split_trajectories",
]
