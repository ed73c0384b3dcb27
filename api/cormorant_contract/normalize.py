"""`spec.collection.normalize`: running statistics of observations and returns that all workers of a job share."""

from typing import Annotated

from pydantic import Field

from cormorant_contract.base import Contract
from cormorant_contract.rule import Rule

Clip = Annotated[float, Field(strict=True, ge=0, le=1_000_000, allow_inf_nan=False)]
ObservationKey = Annotated[
    str, Field(strict=True, min_length=1, max_length=128, description="Path of a leaf below the observation.")
]


class NormalizeObservation(Contract):
    """Statistics of the observations that were acted on."""

    clip: Clip = 10.0
    """Bound of normalised values on both sides; 0 does not clip."""

    keys: Annotated[tuple[ObservationKey, ...], Field(max_length=64)] = ()
    """Leaves of a Dict or Tuple observation, for example [pos, arm.joints]. Empty means every floating-point leaf."""

    @classmethod
    def rules(cls) -> "tuple[Rule[NormalizeObservation], ...]":
        return (
            Rule(
                cel="self.keys.all(k, self.keys.exists_one(other, other == k))",
                holds=lambda observation: len(set(observation.keys)) == len(observation.keys),
                sentence="keys contains a key twice; remove one of the two",
                path=("keys",),
            ),
        )


class NormalizeReward(Contract):
    """Statistics of the discounted return; rewards are divided by its standard deviation."""

    gamma: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.99
    """Discount per step of the return."""

    clip: Clip = 10.0
    """Bound of normalised rewards on both sides; 0 does not clip."""


class Normalize(Contract):
    """Running statistics that the whole fleet agrees on. Frames hold raw values."""

    observation: NormalizeObservation | None = None
    """Policies see normalised observations. Unset leaves observations as they are."""

    reward: NormalizeReward | None = None
    """Collects the statistics that learners need to normalise rewards. Unset collects none."""

    @classmethod
    def rules(cls) -> "tuple[Rule[Normalize], ...]":
        return (
            Rule(
                cel="has(self.observation) || has(self.reward)",
                holds=lambda normalize: normalize.observation is not None or normalize.reward is not None,
                sentence="normalize is empty; write observation: {}, reward: {} or both, or remove it",
            ),
        )
