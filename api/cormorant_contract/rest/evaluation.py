"""`/v1/evaluation`: the result table of a job with `collection.episodes`."""

from pydantic import Field, JsonValue

from cormorant_contract.rest.base import Answer, Count


class EpisodeResult(Answer):
    """One episode that was played."""

    task: str
    seed: Count
    options: dict[str, JsonValue]
    """Given to the environment at its reset."""
    total: float = Field(alias="return")
    """The undiscounted return."""
    length: Count
    terminated: bool
    """False: it was truncated."""
    metrics: dict[str, float]
    checkpoint: str = ""
    """URI of the weights; empty where the job has one policy."""


class CheckpointTable(Answer):
    """What one weights file of a sweep has reached."""

    planned: Count
    summary: dict[str, JsonValue]
    tasks: dict[str, JsonValue]


class EvaluationTable(Answer):
    """The episodes that are recorded, in the order of the plan, and what they sum up to."""

    planned: Count
    """Episodes of the evaluation; it is complete when as many are listed."""
    episodes: tuple[EpisodeResult, ...]
    summary: dict[str, JsonValue]
    """Means with 95 % intervals, spread, and the success rate with Wilson's interval."""
    tasks: dict[str, JsonValue]
    """The same by task, where there are several."""
    checkpoints: dict[str, CheckpointTable] = Field(default={})
    """The same by weights file, where there are several."""
