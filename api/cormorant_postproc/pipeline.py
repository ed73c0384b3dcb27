"""Several steps of post-processing in a row, and the one that a manifest asks for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase

from cormorant_postproc.bfloat16 import InBfloat16
from cormorant_postproc.multi_step import MultiStep
from cormorant_postproc.split import split_trajectories


class Pipeline:
    """Applies one step after another.

    Pipeline([RewardClip(), MultiStep(gamma=0.99, n_steps=3)])
    """

    def __init__(self, steps: Sequence[Callable[[TensorDictBase], TensorDict]]) -> None:
        self.steps = tuple(steps)

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """The batch after all steps; a shallow copy of it without any."""
        result: TensorDict = batch.copy() if not self.steps else batch
        for step in self.steps:
            result = step(result)
        return result


def of_collection(settings: Mapping[str, Any]) -> Pipeline:
    """What `spec.collection` of a manifest asks for: multi-step targets first, then trajectories, then dtypes.

    Args:
        settings: as `Collection.post_processing` gives them; plain data, which travels with batches to clients.
    """
    steps: list[Callable[[TensorDictBase], TensorDict]] = []
    if (multi_step := settings.get("multi_step")) is not None:
        steps.append(MultiStep(gamma=multi_step["gamma"], n_steps=multi_step["steps"]))
    if settings.get("split_trajectories"):
        steps.append(split_trajectories)
    if keys := settings.get("bfloat16"):
        steps.append(InBfloat16(keys))
    return Pipeline(steps)
