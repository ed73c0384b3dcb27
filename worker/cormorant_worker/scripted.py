"""Jobs that a script describes with Python objects instead of a manifest: `open_fleet(env=MyEnv, policy=network)`.

Whatever a manifest can express becomes a CollectorJob; Python objects become `WorkerOverrides`, cloudpickled to the
workers alongside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from cormorant_contract import errors as contract
from cormorant_contract.env import KINDS
from cormorant_contract.job import CollectorJob
from cormorant_contract.parsing import parse_job
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.envs.gymnasium_env import form_of, makes_vector
from cormorant_worker.errors import ManifestError, PolicyLoadError


class FunctionalEnv(Protocol):
    """A functional environment in JAX: of gymnax, Brax, MuJoCo Playground or jumanji."""

    def reset(self, *args: Any, **kwargs: Any) -> Any: ...

    def step(self, *args: Any, **kwargs: Any) -> Any: ...


EnvChoice = str | Callable[..., Any] | Mapping[str, Any] | FunctionalEnv
"""A gymnasium id, or "envpool:" and an EnvPool task; a class or function that makes one gymnasium.Env or PettingZoo
ParallelEnv; a function of `num_envs` that makes a gymnasium VectorEnv; a functional environment in JAX, or its class;
or `spec.env` of a manifest."""

PolicyChoice = Callable[..., Any] | str | Mapping[str, Any]
"""A TensorDictModule or torch module, a callable on observations, "package.module:factory", a mapping of modules with
"policy" among them, or `spec.policy` of a manifest."""

Mode = Literal["async", "sync"]
Vectorization = Literal["subprocess", "inline"]

SCRIPT_ENV = "script:environment"
"""Placeholder for a script's environment in a manifest."""
_DEFAULT_ENVS = 8
_DEFAULT_STEPS = 64
_OF_COLLECTION = {
    "frames_per_batch": "framesPerBatch",
    "total_frames": "totalFrames",
    "init_random_frames": "initRandomFrames",
    "mode": "mode",
    "seed": "seed",
}
"""Arguments, and the fields of `spec.collection` that say the same."""
_OF_ENV = {"num_envs": "numEnvs", "vectorization_mode": "vectorization"}
_ENVPOOL = "envpool:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """Arguments of `open_fleet` and `make_collector` that replace a manifest; documented there. None means "not given":
    a mapping entry that duplicates an argument is refused, even with an equal value.
    """

    env: EnvChoice
    policy: PolicyChoice | None = None
    policy_factory: Callable[..., Any] | None = None
    num_envs: int | None = None
    workers: int = 1
    frames_per_batch: int | None = None
    total_frames: int | None = None
    init_random_frames: int | None = None
    on_policy: bool = False
    """Every frame is from the newest published weights: `maxStaleness: 0`, in rounds of all workers."""
    mode: Mode | None = None
    """None: "sync" with `on_policy`, "async" otherwise."""
    vectorization_mode: Vectorization | None = None
    """None: `usual_vectorization`."""
    usual_vectorization: Vectorization = "subprocess"
    seed: int | None = None
    collection: Mapping[str, Any] | None = None
    info: Sequence[str | Mapping[str, Any]] | None = None

    def job(self) -> CollectorJob:
        """The manifest, with placeholders where environment or policy are Python objects. Raises ManifestError."""
        self._check()
        if isinstance(self.env, Mapping):
            env = {**self.env}
        else:
            of_kind: dict[str, Any] = {"numEnvs": self._num_envs}
            if self._kind == "envpool":
                of_kind["taskId"] = str(self.env).removeprefix(_ENVPOOL)
            else:
                of_kind |= {"id": self.env} if isinstance(self.env, str) else {"entrypoint": SCRIPT_ENV}
            if not self._steps_itself:
                mode = self.vectorization_mode
                of_kind["vectorization"] = self.usual_vectorization if mode is None else mode
            env = {self._kind: of_kind}
        # The job's own check refuses a numEnvs that is no number.
        block = env.get(self._kind)
        count = block.get("numEnvs", 1) if isinstance(block, Mapping) else 1
        steps = _DEFAULT_STEPS * (count if isinstance(count, int) else 1)
        given = {key: value for name, key in _OF_COLLECTION.items() if (value := getattr(self, name)) is not None}
        if self.on_policy:
            given |= {"mode": "sync", "weights": {"maxStaleness": 0}}
        return script_job(
            {
                "env": env | info_block(self.info),
                "policy": self._policy_block or {"random": {}},
                "collection": {"framesPerBatch": steps, **given, **(self.collection or {})},
                "output": {"queue": {"capacityBatches": 2}},
                "replicas": self.workers,
            }
        )

    def overrides(self) -> WorkerOverrides:
        makers: tuple[Callable[..., Any], ...] = ()
        if self._kind == "jax" and not isinstance(self.env, type | Mapping):
            made = self.env
            makers = (lambda: made,)
        elif callable(self.env):
            makers = (self.env,) * (1 if self._steps_itself else self._num_envs)
        return WorkerOverrides(
            envs=makers,
            policy=None if self._policy_block else self.policy,
            policy_factory=None if self.policy_factory is None else partial(_made, self.policy_factory),
            takes_spaces=self.policy_factory is not None,
        )

    @property
    def _policy_block(self) -> dict[str, Any]:
        """`spec.policy`, if a manifest can say the policy."""
        if isinstance(self.policy, str):
            return {"entrypoint": self.policy}
        given = self.policy if isinstance(self.policy, Mapping) and "policy" not in self.policy else {}
        return {**given} if {"random", "entrypoint", "agents"} & given.keys() else {}

    @property
    def _kind(self) -> str:
        """The block of `spec.env`."""
        if isinstance(self.env, Mapping):
            return next((kind for kind in KINDS if kind in self.env), "gymnasium")
        if isinstance(self.env, str):
            return "envpool" if self.env.startswith(_ENVPOOL) else "gymnasium"
        if "agents" in self._policy_block:
            return "pettingzoo"
        return "jax" if form_of(self.env) else "vector" if makes_vector(self.env) else "gymnasium"

    @property
    def _steps_itself(self) -> bool:
        return "vectorization" not in KINDS[self._kind].model_fields

    @property
    def _num_envs(self) -> int:
        if self.num_envs is None and isinstance(self.env, partial):
            return int(self.env.keywords.get("num_envs", _DEFAULT_ENVS))
        return _DEFAULT_ENVS if self.num_envs is None else self.num_envs

    def _check(self) -> None:
        # What `env` or `collection`, as mappings, say themselves.
        mode = self.vectorization_mode
        if mode is not None and self._steps_itself:
            raise ManifestError(f"vectorization_mode={mode!r}: {self._kind} environments step themselves; leave it out")
        said = [(name, "collection", key) for name, key in _OF_COLLECTION.items() if key in (self.collection or {})]
        if isinstance(self.env, Mapping):
            said += [(name, f'env["{self._kind}"]', key) for name, key in _OF_ENV.items()]
            said += [("info", "env", "info")] if "info" in self.env else []
        for name, where, key in said:
            if (value := getattr(self, name)) is not None:
                raise ManifestError(
                    f"{name}={value!r} cannot be combined with {where}, which says it as {key}; leave {name} out"
                )
        modes = {self.mode, (self.collection or {}).get("mode")}
        if self.on_policy and ("async" in modes or "weights" in (self.collection or {})):
            raise ManifestError("on_policy sets mode and collection.weights; leave them out, or on_policy")
        if self.policy is not None and self.policy_factory is not None:
            raise ManifestError(
                "policy and policy_factory exclude each other; pass a policy, or a function that makes one"
            )
        if self._kind != "jax" and not (callable(self.env) or isinstance(self.env, str | Mapping)):
            raise ManifestError(
                f"env is a {type(self.env).__name__}; pass a class or function that makes one environment, a function "
                'of num_envs that makes a vector environment, or an id such as "CartPole-v1" or "envpool:Pong-v5"'
            )


def _made(factory: Callable[..., Any], observation: Any, action: Any) -> Any:
    """Call a script's policy factory in the worker, where None would be a policy of random actions."""
    if (made := factory(observation, action)) is None:
        raise PolicyLoadError(f"policy_factory {factory!r} returned None; return the policy")
    return made


def script_job(spec: Mapping[str, Any]) -> CollectorJob:
    head = {"apiVersion": "cormorant.dev/v1alpha1", "kind": "CollectorJob", "metadata": {"name": "script"}}
    try:
        return parse_job({**head, "spec": spec})
    except contract.ManifestError as error:
        raise ManifestError(str(error)) from error


def info_block(info: Sequence[str | Mapping[str, Any]] | None) -> dict[str, Any]:
    """`spec.env.info` from keys, or from items as a manifest spells them."""
    return {"info": [{"key": item} if isinstance(item, str) else dict(item) for item in info]} if info else {}
