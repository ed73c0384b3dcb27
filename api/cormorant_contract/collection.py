"""`spec.collection`: how much to collect, in what batches, with how much policy lag."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cormorant_contract.base import COUNT_MAX, INT32_MAX, Contract, Count32, Count64, Flag, Whole
from cormorant_contract.episodes import EvaluatedEpisodes
from cormorant_contract.info import EpisodeMetrics
from cormorant_contract.rule import Rule, each_once

Clip = Annotated[float, Field(strict=True, ge=0, le=1_000_000, allow_inf_nan=False)]
ObservationKey = Annotated[
    str, Field(strict=True, min_length=1, max_length=128, description="Path of a leaf below the observation.")
]
OutputKey = Annotated[
    str, Field(strict=True, min_length=1, max_length=253, description="Key in batches; nested keys with dots.")
]


class MultiStep(Contract):
    """n-step returns: rewards summed over several steps, and the observation that many steps ahead as `next`."""

    steps: Annotated[Whole, Field(ge=1, le=1000)] = 3
    """Number of steps to sum rewards over; fewer at the end of a trajectory or a batch."""

    gamma: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.99
    """Discount per step."""


class NormalizeObservation(Contract):
    """Statistics of the observations that were acted on."""

    clip: Clip = 10.0
    """Bound of normalized values on both sides; 0 does not clip."""

    keys: Annotated[tuple[ObservationKey, ...], Field(max_length=64)] = ()
    """Leaves of a Dict or Tuple observation, for example [pos, arm.joints]. Empty means every floating-point leaf."""

    rules = (
        Rule(
            cel="self.keys.all(k, self.keys.exists_one(other, other == k))",
            sentence="keys contains a key twice; remove one of the two",
            path=("keys",),
        ),
    )


class NormalizeReward(Contract):
    """Statistics of the discounted return; rewards are divided by its standard deviation."""

    gamma: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.99
    """Discount per step of the return."""

    clip: Clip = 10.0
    """Bound of normalized rewards on both sides; 0 does not clip."""


class Normalize(Contract):
    """Running statistics that the whole fleet agrees on. Frames hold raw values."""

    observation: NormalizeObservation | None = None
    """Policies see normalized observations. Unset leaves observations as they are."""

    reward: NormalizeReward | None = None
    """Collects the statistics that learners need to normalize rewards. Unset collects none."""

    rules = (
        Rule(
            cel="has(self.observation) || has(self.reward)",
            sentence="normalize is empty; write observation: {}, reward: {} or both, or remove it",
        ),
    )


class WeightsPolicy(Contract):
    """Bound on the policy lag of workers."""

    max_staleness: Count32 | None = None
    """How many versions a worker may lag behind before it waits for newer weights. 0 is strictly on-policy; unset means
    no bound. In sync mode, a script's fleet begins a round when the learner asks for it, which is on-policy if the
    learner publishes after every round; set 0 for learners over REST."""


_EPISODES = (
    "(has(self.episodes.count) ? self.episodes.count : "
    "has(self.episodes.resetOptions) ? self.episodes.resetOptions.size() : 0)"
)


class Collection(Contract):
    """How much to collect, and in what batches."""

    mode: Literal["sync", "async"] = "async"
    """sync: one batch from every worker, stacked. async: batches of single workers in the order of completion."""

    frames_per_batch: Annotated[Whole, Field(ge=1, le=INT32_MAX)]
    """Frames per batch and worker; a multiple of numEnvs."""

    total_frames: Annotated[Whole, Field(ge=1, le=COUNT_MAX)] | None = None
    """Exact number of frames of the job; the last batch may be shorter. Unset means until the job is suspended or
    deleted."""

    init_random_frames: Count64 = 0
    """Number of frames at the start of the job that use random actions, shared by the workers."""

    max_frames_per_trajectory: Count32 = 0
    """Frames after which a trajectory is truncated and its environment reset. 0 means no limit."""

    reset_at_each_batch: Flag = False
    """Start every batch with freshly reset environments."""

    split_trajectories: Flag = False
    """Deliver each batch to learners as padded trajectories, one per row, with collector.mask. A dataset has frames as
    they were collected."""

    multi_step: MultiStep | None = None
    """Deliver n-step rewards to learners. A dataset has frames as they were collected."""

    bfloat16: Annotated[tuple[OutputKey, ...], Field(min_length=1, max_length=16)] | None = None
    """Policy outputs and states that learners get as torch.bfloat16. Stored as float32, which holds them exactly."""

    episode_metrics: EpisodeMetrics | None = None
    """Numbers reported for every episode beside its return and length. Unset means none."""

    normalize: Normalize | None = None
    """Normalize observations and rewards with running statistics that all workers share. Frames hold raw values."""

    seed: Count64 = 0
    """Seed of the job. Every environment of the fleet gets its own, derived from it."""

    preemptive_threshold: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 1.0
    """Share of workers that must complete their batch of a sync round before the others hand over short ones at their
    next vector step. Missing frames are collected later; totalFrames stays exact. 1 waits for all."""

    weights: WeightsPolicy = WeightsPolicy()
    episodes: EvaluatedEpisodes | None = None
    """Makes the job an evaluation: these episodes are played, each exactly once, and no frames are delivered. Of
    the other fields only seed, episodeMetrics and normalize.observation matter."""

    @property
    def post_processing(self) -> dict[str, Any]:
        """Post-processing of batches before learners get them, as plain data that travels with them; often empty."""
        asked: dict[str, Any] = {}
        if self.multi_step is not None:
            asked["multi_step"] = {"steps": self.multi_step.steps, "gamma": self.multi_step.gamma}
        if self.split_trajectories:
            asked["split_trajectories"] = True
        if self.bfloat16:
            asked["bfloat16"] = list(self.bfloat16)
        return asked

    rules = (
        # A bound that excludes itself would be spelled differently by JSON Schema and by Kubernetes.
        Rule(
            cel="self.preemptiveThreshold > 0.0",
            sentence="preemptiveThreshold 0 would not wait for any worker; use a fraction above 0, at most 1",
            path=("preemptiveThreshold",),
        ),
        Rule(
            cel="self.preemptiveThreshold >= 1.0 || self.mode == 'sync'",
            sentence="preemptiveThreshold below 1 needs mode sync; in async mode no worker waits for a straggler",
            path=("preemptiveThreshold",),
        ),
        each_once(
            "episodeMetrics",
            "the name {twice} occurs twice in episodeMetrics; give each metric a name of its own",
            key="name",
        ),
        Rule(
            cel=f"!has(self.episodes) || has(self.episodes.seeds) || self.seed + {_EPISODES} <= {INT32_MAX + 1}",
            sentence="seed {self.seed} leaves no room for the episodes' own seeds, which end at 2147483647; lower it",
            path=("seed",),
        ),
    )
