"""`spec.policy` and `spec.code`: the policy, and the code of policies and environments."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import IMAGE_PATTERN, Contract, Count64, Entrypoint, Flag, JsonObject, Label, Text, Whole
from cormorant_contract.rule import Rule, one_of


class RandomPolicy(Contract):
    """Uniformly random actions. No options."""


class VersionSample(Contract):
    """Versions drawn at the start of each episode, for all of it."""

    window: Annotated[Whole, Field(ge=1, le=1024)] = 10
    """How many of the newest versions are drawn from."""

    latest_ratio: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.5
    """Share of episodes with the newest version."""


class AgentPolicy(Contract):
    """The policy of one group: random, entrypoint, or the model of another group."""

    random: RandomPolicy | None = None
    """Random actions: {}."""

    entrypoint: Entrypoint | None = None
    """Factory, called with the spaces of one agent and kwargs. Its model has the group's name."""

    kwargs: JsonObject = Field(default={})
    """Keyword arguments of the factory."""

    model: Annotated[str, Field(strict=True, max_length=63)] | None = None
    """Group with an entrypoint, whose model acts here, too."""

    version: Count64 | None = None
    """Pins the newest version up to this one; 0: the initial weights."""

    sample: VersionSample | None = None

    rules = (
        Rule(
            cel="[has(self.random), has(self.entrypoint), has(self.model)].filter(x, x).size() == 1",
            sentence="write exactly one of random, entrypoint and model",
        ),
        Rule(
            cel="[has(self.random), has(self.version), has(self.sample)].filter(x, x).size() < 2",
            sentence="write at most one of random, version and sample",
        ),
    )


Agents = Annotated[dict[str, AgentPolicy], Field(min_length=1, max_length=32)]

_UNMADE = (
    "has(self.agents[g].model) && !self.agents.exists(h, h == self.agents[g].model && has(self.agents[h].entrypoint))"
)
"""CEL: group g names a model that no entrypoint makes."""


class Policy(Contract):
    """The policy of a job: exactly one of random, entrypoint and agents."""

    random: RandomPolicy | None = None
    """Uniformly random actions, written as an empty block: {}."""

    entrypoint: Entrypoint | None = None
    """Factory called with the observation space, the action space and kwargs, for example cormorant.policies:mlp; it
    returns a TensorDictModule, a torch module or a callable. Cannot be changed."""

    kwargs: JsonObject = Field(default={})
    """Keyword arguments of the factory. Cannot be changed."""

    agents: Agents | None = None
    """A policy for each group of agents, by the group's name. Cannot be changed."""

    exploration_type: Literal["random", "mode", "mean", "deterministic"] = "random"
    """How to choose an action from the policy's distribution."""

    initial_weights: Text = ""
    """URI of a safetensors file: file:// or any URI supported by fsspec. Empty keeps the weights that the factory
    made."""

    allow_nonfinite: Flag = False
    """Accept NaN and infinite values, such as masks of minus infinity, in initialWeights, checkpoints and publishes."""

    compile: Literal["off", "auto", "on"] = "off"
    """Faster ways to call the policy, checked against it when a worker starts. auto: those that take a second. on: also
    torch.compile, which takes a minute and needs a C++ compiler."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the network's layers; bfloat16 uses torch.autocast. Log-probabilities are stored as float32."""

    @property
    def playing(self) -> tuple[str, ...]:
        """The groups of agents whose policies are not random, sorted."""
        return tuple(sorted(group for group, one in (self.agents or {}).items() if one.random is None))

    def versions_kept(self, model: str, versions: Sequence[int]) -> set[int]:
        """The versions of a model that groups may still draw, or have pinned. `versions`: ascending."""
        kept = set[int]()
        for group, one in (self.agents or {}).items():
            if (one.model or group) == model:
                if one.sample is not None:
                    kept.update(versions[-one.sample.window :])
                if one.version is not None:
                    kept.update([version for version in versions if version <= one.version][-1:])
        return kept

    rules = (
        one_of(
            "random",
            "entrypoint",
            "agents",
            remedy="write random: {} for random actions, the entrypoint of a factory, or a policy for each group "
            "of agents",
        ),
        Rule(
            cel=f"!has(self.agents) || !self.agents.exists(g, {_UNMADE})",
            sentence="model {model} is not a group with an entrypoint; name one that has it",
            values={"model": f"self.agents[self.agents.filter(g, {_UNMADE})[0]].model"},
            path=("agents",),
        ),
        Rule(
            cel="has(self.entrypoint) || (self.compile == 'off' && self.dtype == 'float32')",
            sentence="compile {self.compile} and dtype {self.dtype} need policy.entrypoint: they are for one "
            "network; remove them",
        ),
        # Published weights and the keys of a batch belong to one policy.
        Rule(
            cel=" && ".join(
                f"has(self.{x}) == has(oldSelf.{x}) && (!has(self.{x}) || self.{x} == oldSelf.{x})"
                for x in ("entrypoint", "agents")
            ),
            sentence="random, entrypoint and agents are immutable because published weights and collected batches "
            "belong to one policy; create a new job",
        ),
        Rule(
            cel="self.kwargs == oldSelf.kwargs",
            sentence="kwargs are immutable because published weights and collected batches belong to one policy; "
            "create a new job",
            path=("kwargs",),
        ),
    )


class Code(Contract):
    """User code for environments and policies: exactly one of configMap and image."""

    config_map: Label | None = None
    """ConfigMap of the job's namespace whose files, and whose packages.zip, are on PYTHONPATH of head and workers.
    `cormorant submit --code` makes it; `cormorant run` puts the manifest's folder there instead."""

    image: Annotated[str, Field(strict=True, max_length=512, pattern=IMAGE_PATTERN)] | None = None
    """Image whose folder /code is on PYTHONPATH instead."""

    rules = (one_of("configMap", "image", remedy="write one"),)
