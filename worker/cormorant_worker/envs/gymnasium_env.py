"""Builds one gymnasium environment from what a manifest says: id or entrypoint, kwargs, wrappers, a step limit."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium
from gymnasium.wrappers import TimeLimit

from cormorant_worker.entrypoints import did_you_mean, load_object
from cormorant_worker.envs.unsupported import why_unsupported
from cormorant_worker.errors import EnvBuildError, UnknownEnv
from cormorant_worker.spaces import leaves

Env = gymnasium.Env[Any, Any]


class EnvSource(Protocol):
    """Builds gymnasium environments, one a row. Pickled once for every process that builds one."""

    @property
    def name(self) -> str: ...

    def called(self, row: int) -> str:
        """What messages call the environment of a row."""
        return f"environment {row}"

    def build(self, row: int) -> Env:
        """Construct the environment of a row.

        Raises:
            UnknownEnv, EnvBuildError: it cannot be built.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFactory(EnvSource):
    """Which environment to build. Plain data: pickled once for every process that builds one."""

    id: str = ""
    """A registered id, `CartPole-v1` or `module:Name-v0`. Exactly one of id and entrypoint."""
    entrypoint: str = ""
    """`package.module:attribute` of something that returns a gymnasium.Env when called with `kwargs`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[str | Mapping[str, Any], ...] = ()
    """`package.module:attribute`, or `{"entrypoint": ..., "kwargs": {...}}`; the first is the innermost."""
    max_episode_steps: int = 0
    """Truncates episodes after so many steps, under the wrappers; 0 leaves the environment's own limit."""

    def __post_init__(self) -> None:
        if bool(self.id) == bool(self.entrypoint):
            raise EnvBuildError(
                f"exactly one of id and entrypoint names an environment, found {self.id!r} and {self.entrypoint!r}"
            )

    @property
    def name(self) -> str:
        """The id or the entrypoint: what messages call this environment."""
        return self.id or self.entrypoint

    def build(self, row: int = 0) -> Env:  # the same for every row
        """Construct the environment and its wrappers.

        Gymnasium's own warnings (an older version of an id, dtype hints) are dropped.

        Raises:
            UnknownEnv: no such id, with near matches.
            EnvBuildError: a module or attribute is missing, a constructor raised, something returned no gymnasium.Env,
                or a space has no fixed shape.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            env = self._make_registered() if self.id else self._make_from_entrypoint()
            for wrapper in self.wrappers:
                env = _wrap(env, wrapper)
        leaves(env.observation_space, ("observation",))
        leaves(env.action_space, ("action",))
        return env

    def _make_registered(self) -> Env:
        _check_registered(self.id)
        limit = self.max_episode_steps or None
        return _construct(
            lambda: gymnasium.make(self.id, max_episode_steps=limit, disable_env_checker=True, **self.kwargs),
            f"the environment {self.id}",
        )

    def _make_from_entrypoint(self) -> Env:
        make = load_object(self.entrypoint, what="environment")
        env = _construct(lambda: make(**self.kwargs), f"the environment {self.entrypoint}")
        return limit_episodes(env, self.max_episode_steps) if self.max_episode_steps else env


def limit_episodes(env: Env, max_episode_steps: int) -> Env:
    """Truncate after `max_episode_steps`, in the env's own TimeLimit where it has one: a longer limit counts too."""
    layer: Env = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, TimeLimit):
            layer._max_episode_steps = max_episode_steps
            return env
        layer = layer.env
    return TimeLimit(env, max_episode_steps)


_REGISTERED_BY = {"ALE": "ale_py", "dm_control": "shimmy", "metaworld": "metaworld", "Meta-World": "metaworld"}
"""Packages that register a namespace of gymnasium's when they are imported."""


def _check_registered(env_id: str) -> None:
    module_name, colon, name = env_id.rpartition(":")
    if colon:
        try:
            importlib.import_module(module_name)
        except Exception as error:
            raise EnvBuildError(
                f"cannot import {module_name}, which should register {name}: {type(error).__name__}: {error}"
            ) from error
    if name in gymnasium.registry:
        return
    unversioned = [known for known in gymnasium.registry if known.rpartition("-v")[0] == name]
    if unversioned:  # gymnasium takes the newest version of a bare name
        return
    package = _REGISTERED_BY.get(name.partition("/")[0] if "/" in name else "")
    if package is not None and not colon:
        raise UnknownEnv(
            f'no gymnasium environment is registered as "{name}": {package} registers it when it is imported; write '
            f'"{package}:{name}" (and pip install {package.replace("_", "-")} where it is missing)'
        )
    raise UnknownEnv(
        f'no gymnasium environment is registered as "{name}"; a package that registers it on import is named as '
        f'"package:Name-v0"{did_you_mean(name, gymnasium.registry)}'
    )


def _wrap(env: Env, wrapper: str | Mapping[str, Any]) -> Env:
    if isinstance(wrapper, str):
        entrypoint, kwargs = wrapper, {}
    else:
        unknown = sorted(set(wrapper) - {"entrypoint", "kwargs"})
        if unknown or "entrypoint" not in wrapper:
            raise EnvBuildError(
                f'the wrapper {dict(wrapper)} needs "entrypoint" and may have "kwargs"; found {sorted(wrapper)}'
            )
        entrypoint, kwargs = str(wrapper["entrypoint"]), dict(wrapper.get("kwargs", {}))
    wrap = load_object(entrypoint, what="wrapper")
    return _construct(lambda: wrap(env, **kwargs), f"the wrapper {entrypoint}")


def construct(make: Callable[[], Any], what: str) -> Any:
    try:
        return make()
    except Exception as error:
        raise EnvBuildError(f"{what} could not be built: {type(error).__name__}: {error}") from error


def _construct(make: Callable[[], Any], what: str) -> Env:
    env = construct(make, what)
    if not isinstance(env, gymnasium.Env):
        why = why_unsupported(env) or f"a {type(env).__module__}.{type(env).__name__}, not a gymnasium.Env"
        raise EnvBuildError(f"{what} is {why}")
    return env
