"""`spec.output`: where batches go: a queue for learners, a durable dataset, or both."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import Contract, Whole
from cormorant_contract.rule import Rule
from cormorant_contract.workers import ClaimName


class QueueOutput(Contract):
    """A bounded queue that learners read batches from."""

    capacity_batches: Annotated[Whole, Field(ge=1, le=65536)] = 16
    """Maximum number of batches that wait for a learner."""

    on_full: Literal["wait", "drop_oldest"] = "wait"
    """What happens when the queue is full. wait: workers stop stepping until a learner takes a batch. drop_oldest: the
    oldest batch is dropped."""


class DatasetOutput(Contract):
    """A durable dataset of immutable shards."""

    uri: Annotated[str, Field(strict=True, min_length=1, max_length=1024)]
    """Folder of the dataset: file:// or any URI supported by fsspec. Each worker writes its own part in it."""

    secret: ClaimName = ""
    """Secret in the job's namespace. Its keys are environment variables of head and workers: AWS_ACCESS_KEY_ID, ..."""

    format: Literal["shards"] = "shards"
    """Layout on disk; `cormorant dataset export` converts it to other formats."""


class Output(Contract):
    """Where batches go; at least one of queue and dataset."""

    queue: QueueOutput | None = None
    """A bounded queue for learners; {} for its defaults."""

    dataset: DatasetOutput | None = None
    """A durable dataset."""

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        return (
            Rule(
                cel="has(self.queue) || has(self.dataset)",
                sentence="queue and dataset are both missing; add at least one of them, for example queue: {}",
            ),
        )
