"""`spec.policy` and `spec.code`: the policy, and the code of policies and environments."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import IMAGE_PATTERN, Contract, Entrypoint, Flag, JsonObject, Label, Text
from cormorant_contract.rule import Rule, Value, exactly_one


class RandomPolicy(Contract):
    """Uniformly random actions. No options."""


class Policy(Contract):
    """The policy of a job: exactly one of random and entrypoint."""

    random: RandomPolicy | None = None
    """Uniformly random actions, written as an empty block: {}."""

    entrypoint: Entrypoint | None = None
    """Factory called with the observation space, the action space and kwargs; it returns a TensorDictModule, a torch
    module or a callable. For example my_pkg.policies:make_policy, or cormorant.policies:mlp. Cannot be
    changed."""

    kwargs: JsonObject = Field(default={})
    """Keyword arguments of the factory. Cannot be changed."""

    exploration_type: Literal["random", "mode", "mean", "deterministic"] = "random"
    """How to choose an action from the policy's distribution."""

    initial_weights: Text = ""
    """URI of a safetensors file with the initial weights: file:// or any URI supported by fsspec. Empty keeps the
    weights that the factory made."""

    allow_nonfinite: Flag = False
    """Accept weights with NaN or infinite values, such as masks of minus infinity, in initialWeights, checkpoints and
    publishes; otherwise they are refused."""

    compile: Literal["off", "auto", "on"] = "off"
    """Faster ways to call the policy, checked against it when a worker starts: off; auto tries those that take about a
    second; on also tries torch.compile, which takes a minute and needs a C++ compiler."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the network's layers; bfloat16 uses torch.autocast. Log-probabilities are stored as float32."""

    @classmethod
    def rules(cls) -> "tuple[Rule[Policy], ...]":
        return (
            exactly_one(
                "random",
                "entrypoint",
                "write random: {} for random actions, or the entrypoint of a factory",
                found=Value(
                    cel="has(self.random) ? 'random and entrypoint ' + self.entrypoint : 'neither'",
                    get=lambda policy: (
                        "neither" if policy.random is None else f"random and entrypoint {policy.entrypoint}"
                    ),
                ),
            ),
            Rule(
                cel="has(self.entrypoint) || (self.compile == 'off' && self.dtype == 'float32')",
                holds=lambda policy: (
                    policy.entrypoint is not None or (policy.compile == "off" and policy.dtype == "float32")
                ),
                sentence="compile {self.compile} and dtype {self.dtype} need an entrypoint: random actions have no "
                "network; remove them",
            ),
            # Published weights and the keys of a batch belong to one policy.
            Rule(
                cel="has(self.entrypoint) == has(oldSelf.entrypoint) && "
                "(!has(self.entrypoint) || self.entrypoint == oldSelf.entrypoint)",
                sentence="random and entrypoint are immutable because published weights and collected batches belong "
                "to one policy; create a new job",
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

    @classmethod
    def rules(cls) -> "tuple[Rule[Code], ...]":
        return (exactly_one("configMap", "image", "write one", are_strings=True),)
