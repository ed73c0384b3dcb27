"""`env.variants`: several settings of one environment, each played by a share of the environments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cormorant_contract.base import INFO_KEY_PATTERN, Contract, JsonObject, Whole, keyed_by
from cormorant_contract.info import repeated
from cormorant_contract.rule import Rule, Value

if TYPE_CHECKING:
    from cormorant_contract.env import Env
    from cormorant_contract.spec import CollectorJobSpec

MAX_VARIANTS = 64
"""Each one is a label value of metrics."""


class Variant(Contract):
    """One setting of the environment; all have the same spaces."""

    name: Annotated[str, Field(strict=True, max_length=63, pattern=INFO_KEY_PATTERN)]
    """Name in metrics and status."""

    task_id: Annotated[str, Field(strict=True, min_length=1, max_length=253)] | None = None
    """Instead of envpool.taskId or gymnasium.id."""

    kwargs: JsonObject = Field(default={})
    """Added to the environment's kwargs, or in place of them."""

    weight: Annotated[Whole, Field(ge=1, le=1000)] = 1
    """Relative share of the environments."""


Variants = Annotated[
    tuple[Variant, ...], Field(min_length=1, max_length=MAX_VARIANTS, json_schema_extra=keyed_by("name"))
]


def _names(env: "Env") -> tuple[str, ...]:
    return tuple(variant.name for variant in env.variants or ())


def _with_task(env: "Env") -> list[str]:
    """Variants that name a task where there is none to take the place of."""
    has_factory = env.gymnasium is not None and env.gymnasium.entrypoint is not None
    return [variant.name for variant in env.variants or () if has_factory and variant.task_id is not None]


def variant_rules() -> "tuple[Rule[Env], ...]":
    """Names that tell variants apart, and settings that can be met."""
    return (
        Rule(
            cel="",  # the list is keyed by name: the API server refuses a second item itself
            holds=lambda env: not repeated(_names(env)),
            sentence="the name {name} occurs twice in variants; give each variant a name of its own",
            values={"name": Value(cel="", get=lambda env: repeated(_names(env)))},
            path=("variants",),
        ),
        Rule(
            cel="!has(self.variants) || !has(self.gymnasium) || !has(self.gymnasium.entrypoint) || "
            "!self.variants.exists(v, has(v.taskId))",
            holds=lambda env: not _with_task(env),
            sentence="a variant has a taskId, but gymnasium.entrypoint names a factory; write kwargs, or use "
            "gymnasium.id",
            path=("variants",),
        ),
        Rule(
            cel="!has(self.variants) || !has(self.envpool) || self.envpool.batchSize == 0",
            holds=lambda env: not env.variants or env.envpool is None or env.envpool.batch_size == 0,
            sentence="variants step in lockstep, found batchSize {batch}; set batchSize: 0",
            values={
                "batch": Value(
                    cel="self.envpool.batchSize", get=lambda env: env.envpool.batch_size if env.envpool else 0
                )
            },
            path=("variants",),
        ),
    )


def seating(weights: Sequence[int]) -> tuple[int, ...]:
    """Positions of the weights in an order in which every first n are shared as fairly as n allows: position i occurs
    `weights[i]` times. Webster's method: the seats of weight w are at (2j + 1) / w.

    [1, 2] -> (1, 0, 1)
    """
    seats = (((2 * j + 1) / weight, i) for i, weight in enumerate(weights) for j in range(weight))
    # Quotients of equal value are equal as floats, so every machine finds the same order.
    return tuple(i for _, i in sorted(seats))


def seats_of(variants: Sequence[Variant], *, group_number: int, index: int, num_envs: int) -> list[int]:
    """Positions in `variants` that the environments of a worker play, ascending.

    Environment c of worker i takes seat i * num_envs + c of the order, repeated without end; the next group begins one
    seat later.
    """
    if not variants:
        return []
    seats = seating([variant.weight for variant in variants])
    first = index * num_envs + group_number
    return sorted(seats[seat % len(seats)] for seat in range(first, first + num_envs))


def unplayed(spec: "CollectorJobSpec") -> str:
    """What is wrong where the fleet, scaled as far as the manifest lets it, has no environment for some variants; empty
    where it has.
    """
    variants, num_envs = spec.env.variants or (), spec.env.num_envs
    weight = sum(variant.weight for variant in variants)
    played, envs = set[int](), 0
    for number, group in enumerate(spec.worker_groups):
        size = spec.size_of(group) if group.replicas is not None else max(spec.replicas, group.max_replicas or 0)
        if not group.serves:
            envs += size * num_envs
            played.update(seats_of(variants, group_number=number, index=0, num_envs=min(weight, size * num_envs)))
    missing = [variant.name for task_id, variant in enumerate(variants) if task_id not in played]
    if not missing or not envs or spec.collection.episodes is not None:  # an evaluation plays the variants of its list
        return ""
    return (
        f"no environment plays the variants {', '.join(missing)}: the fleet has {envs} environments for "
        f"{len(variants)} variants; raise numEnvs or the number of workers, or change the weights"
    )
