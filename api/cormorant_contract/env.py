"""`spec.env`: which environment a job steps, and with what vectorization.

A kind of environment is a block of `Env`: its class is an `EnvBlock` and one of `Block`. The worker has a module for it
(`cormorant_worker.envs.kinds`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from cormorant_contract.base import (
    IDENTIFIER_PATTERN,
    IMAGE_PATTERN,
    INFO_KEY_PATTERN,
    INT32_MAX,
    URL_PATTERN,
    Contract,
    Count32,
    Entrypoint,
    JsonObject,
    Whole,
    keyed_by,
)
from cormorant_contract.info import Axis, InfoKeys
from cormorant_contract.rule import Rule, each_once, one_of

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


MAX_NUM_ENVS = 65536
NumEnvs = Annotated[Whole, Field(ge=1, le=MAX_NUM_ENVS)]
EnvId = Annotated[str, Field(strict=True, min_length=1, max_length=253)]
Timeout = Annotated[Whole, Field(ge=1, le=86400)]
Bound = Annotated[float, Field(strict=True, ge=-(2**53), le=2**53, allow_inf_nan=False)]
Word = Annotated[str, Field(max_length=253, description="One word.")]
FieldName = Annotated[str, Field(strict=True, max_length=63, pattern=IDENTIFIER_PATTERN)]

_SET_ELSEWHERE = ("num_envs", "batch_size", "num_threads", "max_episode_steps", "seed", "env_seed")
"""EnvPool's arguments that the manifest has fields for. The schema declares them, since CEL sees nothing else."""
_REFUSED = {"type": "integer", "minimum": -INT32_MAX, "maximum": INT32_MAX, "description": "Not allowed here."}


class EnvBlock(Contract):
    """Base of the blocks of all kinds of environments."""

    kind: ClassVar[str]
    """Name of the block in `spec.env`."""
    title: ClassVar[str]
    """For messages, before the environment's name."""
    registered: ClassVar[str] = "id"
    """Field with the name of an environment that the kind's library knows; a variant's `taskId` replaces it."""
    registry: ClassVar[str] = ""
    """"gymnasium": where that name is registered."""
    tuning: ClassVar[tuple[str, ...]] = ("num_envs",)
    """Fields that change only speed, neither frames nor an episode's numbers."""
    num_envs_argument: ClassVar[bool] = False
    """The entrypoint is called with `num_envs` beside kwargs."""

    @property
    def name(self) -> str:
        """Task, id or entrypoint."""
        return getattr(self, self.registered, None) or getattr(self, "entrypoint", None) or ""

    @property
    def longest_step_s(self) -> float:
        """Seconds that a step with a reset may take by the block's own limits; 0: no limit."""
        return 0.0

    def identity(self) -> dict[str, Any]:
        """The block as in a manifest, without `tuning`. Datasets with equal identities hold the same kind of frames."""
        tuning = {to_camel(name) for name in self.tuning}
        return {key: value for key, value in self.to_document().items() if key not in tuning}


class EnvPoolEnv(EnvBlock):
    """Environments that EnvPool ships, stepped by its thread pool in one process."""

    kind = "envpool"
    title = "EnvPool"
    registered = "task_id"
    tuning = ("num_envs", "batch_size", "num_threads")

    task_id: EnvId
    """EnvPool's name of the environment, for example Pong-v5."""

    num_envs: NumEnvs = 1
    """Environments per worker."""

    batch_size: Annotated[Whole, Field(ge=0, le=MAX_NUM_ENVS)] = 0
    """Number of environments returned by one receive; must divide numEnvs. 0 means all of numEnvs: the pool steps in
    lockstep."""

    num_threads: Annotated[Whole, Field(ge=0, le=1024)] = 0
    """EnvPool threads per worker. 0 means the fastest number, found by a short calibration at the start, at most the
    CPU limit."""

    kwargs: Annotated[
        JsonObject,
        WithJsonSchema(
            {
                "type": "object",
                "x-kubernetes-preserve-unknown-fields": True,
                "properties": dict.fromkeys(_SET_ELSEWHERE, _REFUSED),
            }
        ),
    ] = Field(default={})
    """Further options of the environment, passed to EnvPool unchanged."""

    groups: Literal["perAgent"] | None = None
    """perAgent: a group of each player (player_0, player_1). Unset: one group, agents."""

    rules = (
        Rule(
            cel="self.batchSize == 0 || (self.batchSize <= self.numEnvs && self.numEnvs % self.batchSize == 0)",
            sentence="batchSize {self.batchSize} does not divide numEnvs {self.numEnvs}; write a divisor of "
            "numEnvs, or 0 for all",
            path=("batchSize",),
        ),
        Rule(
            cel=" && ".join(f"!has(self.kwargs.{name})" for name in _SET_ELSEWHERE),
            sentence="kwargs cannot have num_envs, batch_size, num_threads, max_episode_steps, seed and env_seed: "
            "write envpool.numEnvs, batchSize and numThreads, env.maxEpisodeSteps and collection.seed instead",
            path=("kwargs",),
        ),
    )


class Wrapper(Contract):
    """A gymnasium wrapper around each environment."""

    entrypoint: Entrypoint
    """Wrapper, called with the environment and kwargs, for example gymnasium.wrappers:FlattenObservation."""

    kwargs: JsonObject = Field(default={})
    """Keyword arguments of the wrapper."""


_ID_OR_ENTRYPOINT = one_of(
    "id", "entrypoint", remedy="write id for a registered environment, or entrypoint for a factory of your own"
)


class GymnasiumEnv(EnvBlock):
    """Environments with gymnasium's interface, each in its own process or all in the worker's process."""

    kind = "gymnasium"
    title = "gymnasium"
    registry = "gymnasium"
    tuning = ("num_envs", "vectorization", "max_restarts", "step_timeout_seconds", "reset_timeout_seconds")

    id: EnvId | None = None
    """Registered name of the environment, for example CartPole-v1 or ALE/Pong-v5. Exactly one of id and entrypoint."""

    entrypoint: Entrypoint | None = None
    """In place of id: factory of one environment, for example my_pkg.envs:make, called with kwargs."""

    vectorization: Literal["subprocess", "inline"] = "subprocess"
    """subprocess: each environment in a process, restarted alone if it crashes or hangs. inline: all in the worker's,
    where messages cost more than steps."""

    num_envs: NumEnvs = 1
    """Environments per worker."""

    kwargs: JsonObject = Field(default={})
    """Keyword arguments of the environment."""

    wrappers: Annotated[tuple[Wrapper, ...], Field(max_length=16)] = ()
    """Wrappers around each environment, innermost first."""

    step_timeout_seconds: Timeout = 60
    """Time limit of a step; an environment's process that exceeds it counts as hung and is restarted alone."""

    reset_timeout_seconds: Timeout = 60
    """Time limit for creating or resetting an environment, whose process is restarted alone if it exceeds it."""

    max_restarts: Annotated[Whole, Field(ge=0, le=INT32_MAX)] = 100
    """Crashed or hung environments that a worker restarts in ten minutes before it fails. Its replacement inherits the
    count."""

    @property
    def longest_step_s(self) -> float:
        return float(self.step_timeout_seconds + self.reset_timeout_seconds)

    rules = (_ID_OR_ENTRYPOINT,)


class GymnasiumVectorEnv(EnvBlock):
    """Environments that are vectorized already: a gymnasium VectorEnv, stepped in the worker's process."""

    kind = "vector"
    title = "gymnasium vector"
    registry = "gymnasium"
    num_envs_argument = True

    id: EnvId | None = None
    """Registered name, for example CartPole-v1 or ale_py:ALE/Pong-v5, for gymnasium.make_vec. Exactly one of id and
    entrypoint."""

    entrypoint: Entrypoint | None = None
    """In place of id: factory, for example my_pkg.envs:make, called with num_envs and kwargs."""

    num_envs: NumEnvs = 1
    """Environments per worker."""

    kwargs: Annotated[
        JsonObject,
        WithJsonSchema(
            {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {"num_envs": _REFUSED}}
        ),
    ] = Field(default={})
    """Further arguments of gymnasium.make_vec, for example vectorization_mode, or of the factory."""

    rules = (
        _ID_OR_ENTRYPOINT,
        Rule(
            cel="!has(self.kwargs.num_envs)",
            sentence="kwargs cannot have num_envs: write vector.numEnvs instead",
            path=("kwargs",),
        ),
    )


class PettingZooEnv(GymnasiumEnv):
    """Environments of several agents with PettingZoo's parallel or AEC interface."""

    kind = "pettingzoo"
    title = "PettingZoo"
    registry = ""

    id: EnvId | None = None
    """Module with a parallel_env or an env, for example mpe2/simple_spread_v3. Exactly one of id and entrypoint."""

    entrypoint: Entrypoint | None = None
    """In place of id: factory of one ParallelEnv or AECEnv, for example my_pkg.envs:make, called with kwargs."""

    groups: Literal["byName", "all", "perAgent"] = "byName"
    """byName: agents whose names differ in a last number (red_0, red_1) are a group. all: one group, agents. perAgent:
    a group of each agent."""

    group_map: Annotated[dict[str, list[str]], Field(min_length=1, max_length=256)] | None = None
    """Names of the agents of each group, in place of groups."""

    episode_ends: Literal["all", "any"] = "all"
    """all: an episode ends when no agent is left. any: it ends when the first agent does."""

    team_reward: Literal["mean", "sum"] | None = None
    """How the agents' rewards are combined into one reward, stored beside those of the groups. Unset stores none."""


class OpenEnvArray(Contract):
    """A field of an OpenEnv message as an array of fixed shape."""

    name: FieldName
    """Name of the field."""

    dtype: Literal["uint8", "int8", "int16", "int32", "int64", "float32", "float64"] = "float32"
    """Type of its numbers."""

    shape: Annotated[tuple[Axis, ...], Field(max_length=8)] = ()
    """Shape of the nested lists; [] for a number."""

    low: Bound | None = None
    """Lowest value. Unset means the lowest of the dtype."""

    high: Bound | None = None
    """Highest value. Unset means the highest of the dtype."""


class OpenEnvAction(OpenEnvArray):
    """A field of an OpenEnv action: one of some words, or an array."""

    values: Annotated[tuple[Word, ...], Field(max_length=4096)] | None = None
    """Words that a discrete action may be, in the order of the policy's actions, for example [UP, DOWN]."""


class OpenEnvFields(Contract):
    """Fields of an OpenEnv server's messages that its own schema says too little about."""

    observation: Annotated[tuple[OpenEnvArray, ...], Field(max_length=64, json_schema_extra=keyed_by("name"))] = ()
    """Fields of the observation. Unset means all numbers, booleans and enumerations of the schema."""

    action: Annotated[tuple[OpenEnvAction, ...], Field(max_length=64, json_schema_extra=keyed_by("name"))] = ()
    """Fields of the action. Unset means all of the schema, which must be enumerations, booleans, or numbers with a
    minimum and a maximum."""


class OpenEnvEnv(EnvBlock):
    """Environments behind an OpenEnv server, one session each: in a container beside each worker, or at a URL."""

    kind = "openenv"
    title = "OpenEnv"
    registered = "image"
    tuning = ("num_envs", "url", "port", "max_restarts", "step_timeout_seconds", "start_timeout_seconds")

    image: Annotated[str, Field(max_length=1024, pattern=IMAGE_PATTERN)] | None = None
    """Image of the server, which the operator starts in every worker's pod. Exactly one of image and url."""

    url: Annotated[str, Field(pattern=URL_PATTERN, max_length=1024)] | None = None
    """Where a server listens already, for example http://127.0.0.1:8000. Exactly one of image and url."""

    port: Annotated[Whole, Field(ge=1, le=65535)] = 8000
    """Port that the image's server listens on."""

    num_envs: NumEnvs = 1
    """Number of sessions per worker. The server must allow as many (max_concurrent_envs)."""

    kwargs: JsonObject = Field(default={})
    """Parameters of every reset, beside the seed."""

    fields: OpenEnvFields = Field(default=OpenEnvFields())
    """Facts that the server's schema lacks: shapes of arrays, ranges."""

    step_timeout_seconds: Timeout = 60
    """Time limit of one answer; a session that exceeds it is opened again."""

    start_timeout_seconds: Timeout = 300
    """How long to wait for a server that starts, or starts again, and for a free session."""

    max_restarts: Annotated[Whole, Field(ge=0, le=INT32_MAX)] = 100
    """Sessions that a worker opens again in ten minutes before it fails. Its replacement inherits the count."""

    @property
    def name(self) -> str:
        return self.image or self.url or ""

    @property
    def longest_step_s(self) -> float:
        return float(2 * self.step_timeout_seconds + self.start_timeout_seconds)

    rules = (
        one_of("image", "url", remedy="write image for a server beside each worker, or url for one that runs already"),
    )


class JaxEnv(EnvBlock):
    """Pure functions in JAX, of gymnax, Brax, MuJoCo Playground or jumanji, stepped by one compiled call on the CPU."""

    kind = "jax"
    title = "JAX"

    entrypoint: Entrypoint
    """Factory of the functional environment, for example gymnax:make, called with kwargs. Without a wrapper that
    vectorizes or resets."""

    num_envs: NumEnvs = 1
    """Environments per worker."""

    kwargs: JsonObject = Field(default={})
    """Keyword arguments of the factory."""


class Recycle(Contract):
    """When an environment in a subprocess is replaced, at the end of an episode, without losing a frame. 0: never."""

    rss_mi_b: Count32 = 0
    """Resident memory of its process, in MiB, above which it is replaced."""

    episodes: Count32 = 0
    """Episodes after which it is replaced."""


Block = EnvPoolEnv | GymnasiumEnv | GymnasiumVectorEnv | PettingZooEnv | OpenEnvEnv | JaxEnv
KINDS: Mapping[str, type[EnvBlock]] = {block.kind: block for block in get_args(Block)}
"""The blocks of `spec.env` by their names, one for each kind of environment."""
_SUBPROCESS = " || ".join(
    f"(has(self.{kind}) && self.{kind}.vectorization == 'subprocess')"
    for kind, block in KINDS.items()
    if "vectorization" in block.model_fields
)


class Env(Contract):
    """The environment of a job: exactly one of envpool, gymnasium, vector, pettingzoo, openenv and jax. Immutable."""

    envpool: EnvPoolEnv | None = None
    """An environment that EnvPool ships."""

    gymnasium: GymnasiumEnv | None = None
    """An environment with gymnasium's interface."""

    vector: GymnasiumVectorEnv | None = None
    """A vector environment with gymnasium's interface."""

    pettingzoo: PettingZooEnv | None = None
    """An environment of several agents with PettingZoo's interface."""

    openenv: OpenEnvEnv | None = None
    """An environment behind an OpenEnv server."""

    jax: JaxEnv | None = None
    """A functional environment in JAX."""

    recycle: Recycle | None = None
    """When environments in subprocesses are replaced. Unset means never."""

    max_episode_steps: Count32 = 0
    """Steps after which an episode is truncated. 0 means the environment's own limit."""

    info: InfoKeys | None = None
    """Values of the environment's info that are stored with every frame. Unset means none."""

    variants: Variants | None = None
    """Variants of the environment, each with its share of the environments."""

    @property
    def num_envs(self) -> int:
        """Environments that one worker steps, whichever kind they are."""
        return self.block.num_envs

    @property
    def block(self) -> Block:
        """The one that is set."""
        blocks: list[Block | None] = [getattr(self, kind) for kind in KINDS]
        return next(block for block in blocks if block is not None)

    @property
    def name(self) -> str:
        """Task, id or entrypoint."""
        return self.block.name

    def of_variant(self, variant: Variant) -> "Env":
        """This environment as one of its variants has it, without variants."""
        named = {self.block.registered: variant.task_id} if variant.task_id else {}
        env = self.with_block({"kwargs": {**self.block.kwargs, **variant.kwargs}, **named})
        return env.model_copy(update={"variants": None})

    def with_block(self, changes: Mapping[str, object]) -> "Env":
        """This environment with other values in its block, of those that blocks of its kind have."""
        known = {name: value for name, value in changes.items() if name in type(self.block).model_fields}
        return self.model_copy(update={self.block.kind: self.block.model_copy(update=known)})

    rules = (
        one_of(*KINDS, remedy="write one block"),
        each_once("info", "the key {twice} occurs twice in info; write each key once", key="key"),
        each_once(
            "variants", "the name {twice} occurs twice in variants; give each variant a name of its own", key="name"
        ),
        Rule(
            cel="!has(self.variants) || !has(self.gymnasium) || !has(self.gymnasium.entrypoint) || "
            "!self.variants.exists(v, has(v.taskId))",
            sentence="a variant has a taskId, but gymnasium.entrypoint names a factory; write kwargs, or use "
            "gymnasium.id",
            path=("variants",),
        ),
        Rule(
            cel="!has(self.variants) || !has(self.envpool) || self.envpool.batchSize == 0",
            sentence="variants step in lockstep, found batchSize {self.envpool.batchSize}; set batchSize: 0",
            path=("variants",),
        ),
        Rule(
            cel="!has(self.variants) || has(self.envpool) || has(self.gymnasium) || has(self.pettingzoo)",
            sentence="variants are for envpool, gymnasium and pettingzoo: others have one setting; remove them",
            path=("variants",),
        ),
        Rule(
            cel="!has(self.vector) || self.maxEpisodeSteps == 0",
            sentence="a vector environment limits its own episodes; remove maxEpisodeSteps, and write its limit in "
            "vector.kwargs or collection.maxFramesPerTrajectory",
            path=("vector",),
        ),
        Rule(
            cel=f"!has(self.recycle) || {_SUBPROCESS}",
            sentence="recycle replaces processes of single environments; use gymnasium or pettingzoo with "
            "vectorization: subprocess, or remove recycle",
            path=("recycle",),
        ),
        Rule(
            cel="self == oldSelf",
            sentence="env is immutable because collected data belongs to one environment; create a new job",
        ),
    )
