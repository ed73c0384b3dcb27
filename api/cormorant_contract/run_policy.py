"""`spec.runPolicy`: deadlines, restarts and what is left of a job that ended."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import INT32_MAX, Contract, Count32, Whole


class RunPolicy(Contract):
    """Deadlines, restarts and what is left of a job that ended."""

    max_head_restarts: Count32 = 6
    """Failures of the head after which the job fails. Evictions and preemptions do not count."""

    max_restarts_per_slot: Count32 = 10
    """Failures of the worker in one slot after which the job fails."""

    startup_deadline_seconds: Count32 = 1800
    """A job that has collected nothing after this time fails; so does one that collected, and then is not ready for so
    long though its pods have room. 0 means no deadline."""

    progress_deadline_seconds: Count32 = 600
    """Time without a new frame after which the job counts as stalled. 0 means never. Waiting for a learner and pause
    are no stall."""

    on_stall: Literal["Restart", "Fail"] = "Restart"
    """What a stall does: a new head and new workers, or failure."""

    unschedulable_after_seconds: Count32 = 600
    """Time that a pod may wait for a node before onUnschedulable acts. 0 means for ever."""

    on_unschedulable: Literal["Wait", "ScaleToFit", "Fail"] = "Wait"
    """What to do when pods find no node: wait, run with the workers that fit, or fail."""

    max_unavailable: Annotated[Whole, Field(ge=1, le=INT32_MAX)] = 1
    """Workers that a change of image or template may take away at one time."""

    drain_seconds: Count32 = 600
    """Time for learners to take the last batches after the last frame, and for workers to finish a batch when they are
    suspended or scaled down."""

    ttl_seconds_after_finished: Count32 | None = None
    """Time after which a completed or failed job is deleted. Unset: never, as with a Job of batch/v1."""

    clean_pod_policy: Literal["None", "Workers", "All"] = "Workers"
    """Pods that are deleted when the job ends; the head's pod keeps the logs."""
