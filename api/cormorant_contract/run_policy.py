"""`spec.runPolicy`: deadlines, restarts and the cleanup of a finished job."""

from typing import Literal

from cormorant_contract.base import Contract, Count32, CountOrPercent


class RunPolicy(Contract):
    """Deadlines, restart limits, and what happens to a finished job."""

    max_head_restarts: Count32 = 6
    """Failures of the head after which the job fails. Evictions and preemptions do not count."""

    max_restarts_per_slot: Count32 = 10
    """Failures of the worker in one slot after which the job fails."""

    startup_deadline_seconds: Count32 = 1800
    """Time after which a job fails that has collected nothing, or is not ready although its pods can be scheduled. 0
    means no deadline."""

    progress_deadline_seconds: Count32 = 600
    """Time without a new frame after which the job counts as stalled. 0 means never. Waiting for a learner and
    pauses do not count."""

    on_stall: Literal["Restart", "Fail"] = "Restart"
    """What a stall does: a new head and new workers, or failure."""

    unschedulable_after_seconds: Count32 = 600
    """Time that a pod may wait for a node before onUnschedulable acts. 0 means without limit."""

    on_unschedulable: Literal["Wait", "ScaleToFit", "Fail"] = "Wait"
    """What to do when pods find no node: wait, run with the workers that fit, or fail."""

    max_unavailable: CountOrPercent = 1
    """Workers that a change of image or template may take away at one time: a number, or a percentage of all workers
    like 5%, rounded down, at least one."""

    drain_seconds: Count32 = 600
    """Time for learners to take the last batches after the last frame, and for workers to finish a batch when they are
    suspended or scaled down."""

    ttl_seconds_after_finished: Count32 | None = None
    """Time after which a completed or failed job is deleted. Unset: never, as with a Job of batch/v1."""

    clean_pod_policy: Literal["None", "Workers", "All"] = "Workers"
    """Pods that are deleted when the job ends; the head's pod keeps the logs."""

    disruption_budget: Literal["None", "Head", "All"] = "Head"
    """Pods that a drain of nodes may not evict: none, the head, or the head and all workers but
    maxUnavailable."""

    def unavailable_of(self, workers: int) -> int:
        """Number of `count` workers that a change may take away at a time."""
        if isinstance(self.max_unavailable, str):
            return max(1, workers * int(self.max_unavailable.removesuffix("%")) // 100)
        return self.max_unavailable
