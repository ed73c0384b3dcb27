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
    returns: dict[str, float] = Field(default={})
    """Return of each group of agents."""
    checkpoint: str = ""
    """URI of the weights, or the URI of each group of agents as JSON; empty where the job has one policy."""


class CheckpointTable(Answer):
    """Results of one weights file of a sweep."""

    planned: Count
    summary: dict[str, JsonValue]
    tasks: dict[str, JsonValue]


class EvaluationTable(Answer):
    """The recorded episodes, in the order of the plan, and their summary."""

    planned: Count
    """Episodes of the evaluation; it is complete when as many are listed."""
    episodes: tuple[EpisodeResult, ...]
    summary: dict[str, JsonValue]
    """Means with 95 % intervals, spread, and the success rate with Wilson's interval."""
    tasks: dict[str, JsonValue]
    """The same by task, where there are several."""
    checkpoints: dict[str, CheckpointTable] = Field(default={})
    """The same by weights file or pairing, where there are several."""
