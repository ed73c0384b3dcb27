"""Builds one gymnasium environment from what a manifest says: id or entrypoint, kwargs, wrappers, a step limit."""

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium
from gymnasium.wrappers import TimeLimit

from cormorant_worker.errors import EnvBuildError, UnknownEnv
from cormorant_worker.spaces import leaves

Env = gymnasium.Env[Any, Any]


class EnvSource(Protocol):
    """Builds gymnasium environments, one a row. Pickled once for every process that builds one."""

    @property
    def name(self) -> str: ...

    def called(self, row: int) -> str:
        """What messages call the environment of a row."""

    def build(self, row: int) -> Env:
        """Construct the environment of a row.

        Raises:
            UnknownEnv, EnvBuildError: it cannot be built.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFactory:
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

    def called(self, row: int) -> str:
        return f"environment {row}"

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


def load_object(entrypoint: str, *, what: str) -> Callable[..., Any]:
    """Import `package.module:attribute`.

    Args:
        entrypoint: where it is; the attribute may have dots.
        what: "environment" or "wrapper", for messages.

    Raises:
        EnvBuildError: the form is wrong, the import failed, the attribute is missing or cannot be called.
    """
    module_name, _, attribute = entrypoint.partition(":")
    if not module_name or not attribute:
        raise EnvBuildError(f'the {what} entrypoint "{entrypoint}" is not of the form "package.module:attribute"')
    if module_name == "__main__":
        raise EnvBuildError(
            f"the {what} entrypoint {entrypoint} names the script itself, which workers do not import; move "
            f"{attribute} to a module beside the manifest, or pass the object: open_fleet(env={attribute})"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise EnvBuildError(
            f"cannot import {module_name} of the {what} entrypoint {entrypoint}: {type(error).__name__}: {error}; "
            "is it installed, or in a folder on PYTHONPATH?"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            hint = _did_you_mean(name, [known for known in vars(found) if not known.startswith("_")])
            raise EnvBuildError(f"{module_name} has no {attribute}, named in the {what} entrypoint {entrypoint}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise EnvBuildError(f"{entrypoint} is a {type(found).__name__}; the {what} entrypoint must be callable")
    return found  # type: ignore[no-any-return]  # whatever the user wrote, and it can be called


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
        f'"package:Name-v0"{_did_you_mean(name, gymnasium.registry)}'
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
        raise EnvBuildError(f"{what} is a {type(env).__module__}.{type(env).__name__}, not a gymnasium.Env")
    return env


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    # Processes of environments import this module, and never pydantic, which takes 0.4 s.
    from cormorant_contract.sentences import did_you_mean

    return did_you_mean(name, known)
