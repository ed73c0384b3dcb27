"""Post-processing of batches: functions of TensorDicts, on the CPU and on the GPU."""

from cormorant_postproc import (
    FrameStack,
    MultiStep,
    Pipeline,
    Postproc,
    PostprocError,
    RewardClip,
    normalized,
    split_trajectories,
)

__all__ = [
    "FrameStack",
    "MultiStep",
    "Pipeline",
    "Postproc",
    "PostprocError",
    "RewardClip",
    "normalized",
    "split_trajectories",
]
