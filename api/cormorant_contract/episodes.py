"""`spec.collection.episodes`: the job is an evaluation, which plays a fixed list of episodes, each exactly once."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from cormorant_contract.base import Contract, Count32, Flag, JsonObject, Whole
from cormorant_contract.env import Variant, seating
from cormorant_contract.rule import each_once, one_of

MAX_EPISODES = 100_000
_MAX_LISTED = 10_000
MAX_CHECKPOINTS = 256
"""Also the most pairings of them."""

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
    checkpoint: str = ""
    """URI of the weights file, or with policies of groups of agents a pairing, as `files_of` reads it; empty: the job's
    own weights.
    """

    @property
    def start(self) -> str:
        """Identifies the episode's start; equal for every checkpoint that plays it."""
        return _compact([self.task, self.seed, self.options])

    @property
    def key(self) -> str:
        """Key under which results are stored."""
        return _compact([self.task, self.seed, self.options, self.checkpoint]) if self.checkpoint else self.start


def files_of(checkpoint: str) -> dict[str, str]:
    """URI of each group's weights file in a pairing, which is written as JSON; empty: it is a single file."""
    return dict(json.loads(checkpoint)) if checkpoint.startswith("{") else {}


def _compact(parts: Any) -> str:
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


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
    """Options of gymnasium's reset, one episode each, for example the number of an initial state; seeds as with
    count."""

    deterministic: Flag = True
    """true: the policy's best action. false: actions are drawn, each episode from its own random stream."""

    per_task: Flag = True
    """true: every variant plays all of these episodes. false: each episode is played once, and the variants take turns
    in the shares of their weights."""

    checkpoints: (
        Annotated[
            tuple[Annotated[str, Field(strict=True, min_length=1, max_length=2048, description="URI.")], ...],
            Field(min_length=1, max_length=MAX_CHECKPOINTS, json_schema_extra={"x-kubernetes-list-type": "set"}),
        ]
        | None
    ) = None
    """Safetensors files that play all of these episodes, one after the other: file:// or any URI supported by fsspec.
    With policy.agents, every pairing of them plays. Unset means policy.initialWeights alone."""

    @property
    def num_listed(self) -> int:
        """Number of listed episodes; several tasks and checkpoints may play each of them."""
        return self.count or len(self.seeds or self.reset_options or ())

    def num_pairings(self, num_groups: int) -> int:
        return int(len(self.checkpoints or (None,)) ** max(1, num_groups))

    def num_planned(self, num_variants: int, num_groups: int = 0) -> int:
        tasks = num_variants if self.per_task and num_variants else 1
        return self.num_listed * tasks * self.num_pairings(num_groups)

    def plan(
        self, first_seed: int, variants: Sequence[Variant] = (), groups: Sequence[str] = ()
    ) -> tuple[PlannedEpisode, ...]:
        """The episodes, in the order of the result table. `groups`: of agents, for which checkpoints are paired."""
        played = self.checkpoints or ("",)
        if self.checkpoints and groups:
            pairings = itertools.product(self.checkpoints, repeat=len(groups))
            played = tuple(_compact(dict(zip(groups, uris, strict=True))) for uris in pairings)
        seeds = self.seeds or range(first_seed, first_seed + self.num_listed)
        listed = list(zip(seeds, self.reset_options or ({},) * self.num_listed, strict=True))
        if self.per_task or not variants:
            names = [variant.name for variant in variants] or [""]
            starts = [(name, *episode) for name in names for episode in listed]
        else:
            seats = seating([variant.weight for variant in variants])
            starts = [(variants[seats[i % len(seats)]].name, *episode) for i, episode in enumerate(listed)]
        return tuple(
            PlannedEpisode(checkpoint=checkpoint, task=task, seed=seed, options=options)
            for checkpoint in played
            for task, seed, options in starts
        )

    rules = (
        one_of("count", "seeds", "resetOptions", remedy="write count: 100 for 100 seeds from collection.seed on"),
        each_once("seeds", "seed {twice} is listed more than once, and an episode is played once; remove the second"),
        each_once("checkpoints", "checkpoint {twice} is listed more than once; remove the second"),
    )
