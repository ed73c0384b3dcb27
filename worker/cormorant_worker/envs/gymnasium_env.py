"""Sources of gymnasium environments: from a manifest (id or entrypoint, kwargs, wrappers, step limit), from callables
of a script, and with variants. Environment processes import this, so it does not import the contract.
"""

import inspect
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import cloudpickle
import gymnasium
from gymnasium.wrappers import TimeLimit

from cormorant_worker.entrypoints import load_object
from cormorant_worker.errors import EnvBuildError, UnknownEnv
from cormorant_worker.spaces import Space, describe, leaves

Env = gymnasium.Env[Any, Any]


class EnvSource(Protocol):
    """Builds gymnasium environments, one per row. Pickled once for every process that builds one."""

    @property
    def name(self) -> str: ...

    def called(self, row: int) -> str:
        """Name of a row's environment in messages."""
        return f"environment {row}"

    def build(self, row: int) -> Env:
        """Construct the environment of a row. Raises UnknownEnv or EnvBuildError where it cannot be built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFactory(EnvSource):
    """Which environment to build. Plain data: pickled once for every process that builds one."""

    id: str = ""
    """A registered id, `CartPole-v1` or `module:Name-v0`. Exactly one of id and entrypoint."""
    entrypoint: str = ""
    """`package.module:attribute` of something that returns a gymnasium.Env when called with `kwargs`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """`package.module:attribute` and kwargs of each; the first is the innermost."""
    max_episode_steps: int = 0
    """Truncates episodes after this many steps, inside the wrappers; 0 leaves the environment's own limit."""

    @property
    def name(self) -> str:
        return self.id or self.entrypoint

    def build(self, row: int = 0) -> Env:  # the same for every row
        """Construct the environment and its wrappers; gymnasium's own warnings (an older version of an id, dtype hints)
        are dropped. Raises UnknownEnv, with near matches, where there is no such id, and EnvBuildError where a module
        or attribute is missing, a constructor raised, something returned no gymnasium.Env, or a space has no fixed
        shape.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            limit = self.max_episode_steps or None
            if self.id:
                env = _construct(
                    lambda: gymnasium.make(self.id, max_episode_steps=limit, disable_env_checker=True, **self.kwargs),
                    f"the environment {self.id}",
                )
            else:
                made = partial(load_object(self.entrypoint, what="environment"), **self.kwargs)
                env = _construct(made, f"the environment {self.entrypoint}")
                if limit is not None:
                    layer = env
                    while isinstance(layer, gymnasium.Wrapper) and not isinstance(layer, TimeLimit):
                        layer = layer.env
                    if isinstance(layer, TimeLimit):
                        layer._max_episode_steps = limit  # not one around it: a longer limit counts too
                    else:
                        env = TimeLimit(env, limit)
            for entrypoint, kwargs in self.wrappers:
                wrap = load_object(entrypoint, what="wrapper")
                env = _construct(partial(wrap, env, **kwargs), f"the wrapper {entrypoint}")
        leaves(env.observation_space, ("observation",))
        leaves(env.action_space, ("action",))
        return env


def construct(make: Callable[[], Any], what: str) -> Any:
    try:
        return make()
    except EnvBuildError:
        raise
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownEnv(
            f"{what} could not be built: {error} If a package registers it on import, install and write that "
            'package before the id, as in "ale_py:ALE/Pong-v5"'
        ) from error
    except Exception as error:
        raise EnvBuildError(f"{what} could not be built: {type(error).__name__}: {error}") from error


def _construct(make: Callable[[], Any], what: str) -> Env:
    env = construct(make, what)
    if not isinstance(env, gymnasium.Env):
        raise EnvBuildError(
            f"{what} is a {type(env).__module__}.{type(env).__name__}, not a gymnasium.Env; name a vector environment "
            "in env.vector, and one of several agents in env.pettingzoo"
        )
    return env


def form_of(env: Any) -> str:
    """Library of a functional JAX environment, of its class, or of a result of `gymnax.make`: `gymnax`, `brax` or
    `jumanji`; empty: none of them. Inspects the class, because instances of gymnax's wrappers forward `step_env`.
    """
    env = env[0] if isinstance(env, tuple) and env else env
    kind = env if isinstance(env, type) else type(env)
    if not callable(getattr(kind, "reset", None)):
        return ""
    if callable(getattr(kind, "step_env", None)):
        return "gymnax"
    if hasattr(kind, "action_size") and hasattr(kind, "observation_size"):
        return "brax"
    # dm_env has methods of these names.
    names = ("observation_spec", "action_spec", "discount_spec")
    return "jumanji" if all(hasattr(kind, name) and not callable(getattr(kind, name)) for name in names) else ""


def makes_vector(env: Any) -> bool:
    """True for a function or a VectorEnv class that takes `num_envs` by name."""
    if not callable(env) or (isinstance(env, type) and issubclass(env, gymnasium.Env)):
        return False
    try:
        return "num_envs" in inspect.signature(env).parameters
    except (TypeError, ValueError):  # some builtins have none
        return False


class MadeEnvs(EnvSource):
    """Builds gymnasium environments by calling one maker per row. Pickled for every process that builds one."""

    def __init__(self, makers: Sequence[Callable[[], Any]]) -> None:
        self._makers = tuple(makers)
        self._built: dict[int, Any] = {}
        """By row: made, and not given out yet."""

    @property
    def name(self) -> str:
        return " | ".join(dict.fromkeys(name_of(maker) for maker in self._makers))

    def build(self, row: int) -> Env:
        self.make(row)
        made = self._built.pop(row)
        if not isinstance(made, gymnasium.Env):
            raise EnvBuildError(
                f"the environment maker {name_of(self._makers[row])} returned a {type(made).__module__}."
                f"{type(made).__name__}; return a gymnasium.Env, or a vector environment from a function with the "
                "argument num_envs, or for TorchRL's collectors a TorchRL environment with neither a batch size nor "
                "nested keys (put several into a SerialEnv)"
            )
        leaves(made.observation_space, ("observation",))
        leaves(made.action_space, ("action",))
        return made

    def make(self, row: int) -> Any:
        """The environment, whatever it is, that the next `build` of this row takes."""
        if row not in self._built:
            self._built[row] = construct(self._makers[row], f"the environment of {name_of(self._makers[row])}")
        return self._built[row]

    def __reduce__(self) -> Any:
        # Built environments stay here. Closures cannot be pickled, and the process of an environment is ours.
        return _load, (cloudpickle.dumps(self._makers),)


def _load(data: bytes) -> MadeEnvs:
    return MadeEnvs(pickle.loads(data))  # noqa: S301 - from our own parent


def name_of(maker: Callable[..., Any]) -> str:
    inner: Any = maker
    # Not by hasattr: TorchRL's ParallelEnv answers for any name, and so do its answers.
    while isinstance(inner, partial) or inspect.getattr_static(inner, "maker", None):
        inner = inner.func if isinstance(inner, partial) else inner.maker
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return f"{getattr(inner, '__module__', '?')}:{name}"


@contextmanager
def naming(variant: str) -> Iterator[None]:
    """Prefix the errors of an environment with the name of its variant, if it has one."""
    try:
        yield
    except (UnknownEnv, EnvBuildError) as error:
        if not variant:
            raise
        raise type(error)(f"variant {variant}: {error}") from error


def words_of(observation: Space, action: Space) -> str:
    return f"observations {describe(observation)}, actions {describe(action)}"


def check_same(
    whose: str, words: Iterable[tuple[str, str]], *, remedy: str = "use kwargs or tasks whose spaces agree"
) -> None:
    """Refuse environments of different spaces. `words`: for each, its name in messages and `words_of` its spaces."""
    (first, wanted), *others = words
    for name, has in others:
        if has != wanted:
            raise EnvBuildError(f"{whose} have different spaces: {name} has {has}; {first} has {wanted}; {remedy}")


class VariantEnvs:
    """Builds gymnasium environments, each of its variant. Pickled for every process that builds one."""

    def __init__(self, factories: Sequence[EnvSource], names: tuple[str, ...], task_ids: Sequence[int]) -> None:
        """Keep what to build. `task_ids`: for each row, the position of its variant."""
        self._factories, self._names, self._task_ids = tuple(factories), names, tuple(task_ids)

    @property
    def name(self) -> str:
        return " | ".join(dict.fromkeys(self._factories[task_id].name for task_id in self._task_ids))

    def called(self, row: int) -> str:
        return f"environment {row} (variant {self._names[self._task_ids[row]]})"

    def build(self, row: int) -> Env:
        task_id = self._task_ids[row]
        with naming(self._names[task_id]):
            return self._factories[task_id].build(row)
