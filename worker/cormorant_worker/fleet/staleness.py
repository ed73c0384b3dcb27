"""One line in the log for learners that get older policies' frames and never said that they can use them."""

import structlog

from cormorant_contract.job import CollectorJob

log = structlog.get_logger()


class StalenessWarning:
    """Warns once, where the manifest sets no `maxStaleness` and the policy explores. Used without the fleet's lock."""

    def __init__(self, job: CollectorJob) -> None:
        spec = job.spec
        self._is_due = spec.collection.weights.max_staleness is None and spec.policy.exploration_type == "random"

    def note(self, *, acted: int, newest: int) -> None:
        """A batch was handed out in which version `acted` (-1: random actions) is the oldest."""
        if self._is_due and acted >= 0 and newest - acted > 1:
            self._is_due = False
            log.warning(
                "batch_is_stale",
                versions=newest - acted,
                reason="workers collect while the learner learns",
                remedy="for PPO and other on-policy algorithms pass on_policy=True, or set spec.collection.weights."
                "maxStaleness: 0 in the manifest; for off-policy ones set it to as many versions as they accept",
            )
