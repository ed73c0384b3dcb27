"""`spec.collection`: how much to collect, in what portions, with what freshness."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cormorant_contract.base import COUNT_MAX, INT32_MAX, Contract, Count32, Count64, Flag, Whole
from cormorant_contract.rule import Rule


class MultiStep(Contract):
    """Rewards summed over several steps, and what lies as many steps ahead as `next`."""

    steps: Annotated[Whole, Field(ge=1, le=1000)] = 3
    """Steps that a reward is summed over; fewer at the end of a trajectory or of a batch."""

    gamma: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.99
    """Discount per step, above 0."""

    @classmethod
    def rules(cls) -> "tuple[Rule[MultiStep], ...]":
        """A bound that excludes itself."""
        return (
            Rule(
                cel="self.gamma > 0.0",
                holds=lambda multi_step: multi_step.gamma > 0,
                sentence="gamma 0 would leave nothing of what lies ahead; give a discount above 0, at most 1",
                path=("gamma",),
            ),
        )


class WeightsPolicy(Contract):
    """How fresh the weights must be that a worker acts with."""

    max_staleness: Count32 | None = None
    """Published versions that a worker may be behind: it waits for weights before it acts with older ones. 0 means
    strictly on-policy; unset means no bound."""


class Collection(Contract):
    """How much to collect, in what portions."""

    mode: Literal["sync", "async"] = "async"
    """sync: one batch from every worker, stacked. async: batches as they come, first ready, first served."""

    frames_per_batch: Annotated[Whole, Field(ge=1, le=INT32_MAX)]
    """Frames of one batch of one worker; a multiple of numEnvs."""

    total_frames: Annotated[Whole, Field(ge=1, le=COUNT_MAX)] | None = None
    """Frames of the whole job, exactly: the last batch may be shorter. Unset means until the job is suspended or
    deleted."""

    init_random_frames: Count64 = 0
    """Frames of the whole job, at its start, whose actions are random."""

    max_frames_per_trajectory: Count32 = 0
    """Frames after which a trajectory is truncated and its environment reset. 0 means no limit."""

    reset_at_each_batch: Flag = False
    """Start every batch with freshly reset environments."""

    split_trajectories: Flag = False
    """Give learners each batch as trajectories: one a row, padded, with collector.mask. A dataset has frames as they
    were collected."""

    multi_step: MultiStep | None = None
    """Give learners rewards summed over several steps. A dataset has frames as they were collected."""

    seed: Count64 = 0
    """Seed of the job. Every environment of the fleet gets its own, derived from it."""

    preemptive_threshold: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 1.0
    """Share of the workers whose batches of a sync round must be complete before the others hand over what they have,
    at their next vector step: a straggler does not hold up the rest. What it lacks is collected later; totalFrames
    stays exact. 1 waits for everyone."""

    weights: WeightsPolicy = WeightsPolicy()
    """How fresh the weights must be."""

    @property
    def post_processing(self) -> dict[str, Any]:
        """What becomes of batches on their way to learners, as plain data that travels with them; often nothing."""
        asked: dict[str, Any] = {}
        if self.multi_step is not None:
            asked["multi_step"] = {"steps": self.multi_step.steps, "gamma": self.multi_step.gamma}
        if self.split_trajectories:
            asked["split_trajectories"] = True
        return asked

    @classmethod
    def rules(cls) -> "tuple[Rule[Collection], ...]":
        """What must hold between its fields."""
        return (
            # A bound that excludes itself would be spelled differently by JSON Schema and by Kubernetes.
            Rule(
                cel="self.preemptiveThreshold > 0.0",
                holds=lambda collection: collection.preemptive_threshold > 0,
                sentence="preemptiveThreshold 0 would wait for nobody; give a share above 0, at most 1",
                path=("preemptiveThreshold",),
            ),
            Rule(
                cel="self.preemptiveThreshold >= 1.0 || self.mode == 'sync'",
                holds=lambda collection: collection.preemptive_threshold >= 1 or collection.mode == "sync",
                sentence="preemptiveThreshold below 1 needs mode sync; in async mode nobody waits for a straggler",
                path=("preemptiveThreshold",),
            ),
        )
