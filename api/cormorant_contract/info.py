"""`env.info` and `collection.episodeMetrics`: values of an environment's info that are stored, or reported per
episode.
"""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import IDENTIFIER_PATTERN, INFO_KEY_PATTERN, Contract, Whole, keyed_by
from cormorant_contract.rule import Rule

InfoName = Annotated[str, Field(strict=True, max_length=63, pattern=INFO_KEY_PATTERN)]

_LIMITS = {
    "bool": (0, 1),
    "uint8": (0, 2**8 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
}
"""Bounds of fill. Those of int64 are wider than what a JSON number holds exactly."""
_FILL_LIMIT = 2**53 - 1
Axis = Annotated[Whole, Field(ge=1, le=65536, description="Length of one axis.")]


class InfoKey(Contract):
    """One value of the environment's info that is stored with every frame."""

    key: InfoName
    """Name in info, and in batches at ("next", "info", key). With dots, a path into nested dicts."""

    dtype: Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64"] | None = None
    """Type that values are stored as. Unset means the environment's own."""

    shape: Annotated[tuple[Axis, ...], Field(max_length=8)] | None = None
    """Shape of one value; [] for a number. Unset means the environment's own."""

    fill: Annotated[float, Field(strict=True, ge=-_FILL_LIMIT, le=_FILL_LIMIT, allow_inf_nan=False)] | None = None
    """Stored where a step's info lacks the key. Unset means NaN for floats, 0 for integers, false (0) for bool."""

    rules = (
        Rule(
            cel="!has(self.fill) || !has(self.dtype) || self.dtype.startsWith('float') || "
            "(double(int(self.fill)) == self.fill && "
            + " && ".join(
                f"(self.dtype != '{dtype}' || (self.fill >= {low}.0 && self.fill <= {high}.0))"
                for dtype, (low, high) in _LIMITS.items()
            )
            + ")",
            sentence="fill {fill} of {self.key} does not fit {self.dtype}; change the fill or the dtype",
            values={"fill": "string(self.fill)"},
            path=("fill",),
        ),
    )


class EpisodeMetric(Contract):
    """One number per episode, computed from the values of one key of env.info in its frames."""

    name: Annotated[str, Field(strict=True, max_length=63, pattern=IDENTIFIER_PATTERN)]
    """Name in status, events and Prometheus, for example success."""

    key: InfoName
    """Key of env.info whose values are numbers."""

    reduce: Literal["last", "sum", "mean", "max", "any"] = "last"
    """How an episode's values become one number. any: 1 where at least one is not 0, else 0."""

    rules = (
        Rule(
            cel="self.name != 'return' && self.name != 'length'",
            sentence="the name {self.name} is taken: return and length of every episode are reported anyway; "
            "choose another name",
            path=("name",),
        ),
    )


InfoKeys = Annotated[tuple[InfoKey, ...], Field(min_length=1, max_length=32, json_schema_extra=keyed_by("key"))]
EpisodeMetrics = Annotated[
    tuple[EpisodeMetric, ...], Field(min_length=1, max_length=16, json_schema_extra=keyed_by("name"))
]
