"""`spec.collection`: how much to collect, in what portions, with what freshness."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import COUNT_MAX, INT32_MAX, Contract, Count32, Count64, Flag, Whole
from cormorant_contract.rule import Rule


class MultiStep(Contract):
    """Rewards summed over several steps. Refused for now: the learner can do it."""

    steps: Annotated[Whole, Field(ge=1, le=1000)] = 3
    """Steps that a reward is summed over."""

    gamma: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.99
    """Discount per step."""


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
    """Give trajectories as padded rows of a batch. Refused for now."""

    multi_step: MultiStep | None = None
    """Rewards summed over several steps. Refused for now."""

    seed: Count64 = 0
    """Seed of the job. Every environment of the fleet gets its own, derived from it."""

    preemptive_threshold: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 1.0
    """Share of the workers whose batches of a sync round must be complete before the others hand over what they have,
    at their next vector step: a straggler does not hold up the rest. What it lacks is collected later; totalFrames
    stays exact. 1 waits for everyone."""

    weights: WeightsPolicy = WeightsPolicy()
    """How fresh the weights must be."""

    @classmethod
    def rules(cls) -> "tuple[Rule[Collection], ...]":
        """What this version cannot do."""
        return (
            Rule(
                cel="!has(self.multiStep)",
                holds=lambda collection: collection.multi_step is None,
                sentence="multiStep is not supported yet; leave it out and sum rewards in the learner",
                path=("multiStep",),
            ),
            Rule(
                cel="!self.splitTrajectories",
                holds=lambda collection: not collection.split_trajectories,
                sentence="splitTrajectories true is not supported yet; leave it out and split by collector.traj_ids",
                path=("splitTrajectories",),
            ),
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
