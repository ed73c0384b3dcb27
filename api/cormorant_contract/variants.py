"""`env.variants`: several settings of one environment, each played by a share of the environments."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from cormorant_contract.base import INFO_KEY_PATTERN, Contract, JsonObject, Whole, keyed_by

MAX_VARIANTS = 64
"""Maximum number of variants. Each one is a label value of metrics."""


class Variant(Contract):
    """One setting of the environment; all have the same spaces."""

    name: Annotated[str, Field(strict=True, max_length=63, pattern=INFO_KEY_PATTERN)]
    """Name in metrics and status."""

    task_id: Annotated[str, Field(strict=True, min_length=1, max_length=253)] | None = None
    """Instead of envpool.taskId or gymnasium.id."""

    kwargs: JsonObject = Field(default={})
    """Keyword arguments that are added to the environment's kwargs, replacing those of the same name."""

    weight: Annotated[Whole, Field(ge=1, le=1000)] = 1
    """Relative share of the environments."""


Variants = Annotated[
    tuple[Variant, ...], Field(min_length=1, max_length=MAX_VARIANTS, json_schema_extra=keyed_by("name"))
]


def seating(weights: Sequence[int]) -> tuple[int, ...]:
    """Positions of the weights, ordered so that every prefix is shared as fairly as possible: position i occurs
    `weights[i]` times. Webster's method: the seats of weight w are at (2j + 1) / w.

    [1, 2] -> (1, 0, 1)
    """
    seats = (((2 * j + 1) / weight, i) for i, weight in enumerate(weights) for j in range(weight))
    # Quotients of equal value are equal as floats, so every machine finds the same order.
    return tuple(i for _, i in sorted(seats))


def seats_of(variants: Sequence[Variant], *, group_number: int, index: int, num_envs: int) -> list[int]:
    """Positions in `variants` that the environments of a worker play, ascending.

    Environment c of worker i takes seat i * num_envs + c of the endlessly repeated order; the next group begins one
    seat later.
    """
    if not variants:
        return []
    seats = seating([variant.weight for variant in variants])
    first = index * num_envs + group_number
    return sorted(seats[seat % len(seats)] for seat in range(first, first + num_envs))
