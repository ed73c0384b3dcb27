"""`spec.collection.episodes`: the job is an evaluation, which plays a fixed list of episodes, each exactly once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from cormorant_contract.base import Contract, Count32, Flag, JsonObject, Whole
from cormorant_contract.rule import Rule, Value

MAX_EPISODES = 100_000
_MAX_LISTED = 10_000


_Options = Annotated[
    JsonObject,
    WithJsonSchema(
        {"type": "object", "description": "Options of one reset.", "x-kubernetes-preserve-unknown-fields": True}
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEpisode:
    """One episode of an evaluation. Equal plans play equal episodes."""

    seed: int
    """Given to the environment at its reset; the policy's noise is derived from it, too."""
    options: Mapping[str, Any]
    """Given to the environment at its reset; empty: none."""
    task: str = ""
    """The variant of the environment; empty: there is only one."""

    @property
    def key(self) -> str:
        """What results are stored under."""
        return json.dumps([self.task, self.seed, self.options], sort_keys=True, separators=(",", ":"))


class EvaluatedEpisodes(Contract):
    """Which episodes an evaluation plays: exactly one of count, seeds and resetOptions."""

    count: Annotated[Whole, Field(ge=1, le=MAX_EPISODES)] | None = None
    """Number of episodes, of each variant of the environment; episode i is reset with collection.seed + i."""

    seeds: (
        Annotated[
            tuple[Annotated[Count32, Field(description="Seed of one episode.")], ...],
            Field(min_length=1, max_length=_MAX_LISTED, json_schema_extra={"x-kubernetes-list-type": "set"}),
        ]
        | None
    ) = None
    """Seeds of the episodes, each one once."""

    reset_options: (
        Annotated[
            tuple[_Options, ...],
            Field(min_length=1, max_length=_MAX_LISTED),
        ]
        | None
    ) = None
    """Options of gymnasium's reset, one episode each, for example the number of an initial state; episode i is reset
    with collection.seed + i as well."""

    deterministic: Flag = True
    """true: the policy's best action. false: actions are drawn, each episode from its own random stream."""

    @property
    def count_of_task(self) -> int:
        """Episodes of one task."""
        return self.count or len(self.seeds or self.reset_options or ())

    def plan(self, first_seed: int, tasks: tuple[str, ...] = ("",)) -> tuple[PlannedEpisode, ...]:
        """The episodes, in the order of the result table: every task plays all of them."""
        seeds = self.seeds or range(first_seed, first_seed + self.count_of_task)
        options = self.reset_options or ({},) * self.count_of_task
        return tuple(
            PlannedEpisode(task=task, seed=seed, options=given)
            for task in tasks
            for seed, given in zip(seeds, options, strict=True)
        )

    @classmethod
    def rules(cls) -> "tuple[Rule[EvaluatedEpisodes], ...]":
        """One list of episodes, and none of them twice."""
        return (
            Rule(
                cel="[has(self.count), has(self.seeds), has(self.resetOptions)].filter(x, x).size() == 1",
                holds=lambda episodes: len(_given(episodes)) == 1,
                sentence="exactly one of count, seeds and resetOptions is required, found {found}; "
                "write count: 100 for 100 seeds from collection.seed on",
                values={
                    "found": Value(
                        cel="[has(self.count), has(self.seeds), has(self.resetOptions)].filter(x, x).size()",
                        get=lambda episodes: len(_given(episodes)),
                    )
                },
            ),
            Rule(
                cel="",  # the list is a set: the API server refuses a second item itself
                holds=lambda episodes: len(set(episodes.seeds or ())) == len(episodes.seeds or ()),
                sentence="seed {twice} is listed more than once, and an episode is played once; remove the second",
                values={
                    "twice": Value(
                        cel="",
                        get=lambda episodes: next(
                            s for s in episodes.seeds or () if (episodes.seeds or ()).count(s) > 1
                        ),
                    )
                },
                path=("seeds",),
            ),
        )


def _given(episodes: EvaluatedEpisodes) -> list[str]:
    found = {"count": episodes.count, "seeds": episodes.seeds, "resetOptions": episodes.reset_options}
    return [name for name, value in found.items() if value is not None]
