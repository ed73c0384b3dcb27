"""Environments that callables of a script make, in place of a registered id or an entrypoint."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import gymnasium

from cormorant_worker.envs.gymnasium_env import Env, EnvSource, construct
from cormorant_worker.envs.unsupported import why_unsupported
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.spaces import leaves


class MadeEnvs(EnvSource):
    """Builds gymnasium environments by calling one maker a row. Pickled for every process that builds one."""

    def __init__(self, makers: Sequence[Callable[[], Any]]) -> None:
        self._makers = tuple(makers)
        self._built: dict[int, Env] = {}
        """By row: built to look at, and not given out yet."""

    @property
    def name(self) -> str:
        return " | ".join(dict.fromkeys(name_of(maker) for maker in self._makers))

    def build(self, row: int) -> Env:
        if row in self._built:
            return self._built.pop(row)
        made = self.make(row)
        if not isinstance(made, gymnasium.Env):
            raise EnvBuildError(
                f"the environment maker {name_of(self._makers[row])} returned {why_unsupported(made) or _other(made)}"
            )
        leaves(made.observation_space, ("observation",))
        leaves(made.action_space, ("action",))
        return made

    def make(self, row: int) -> Any:
        """Whatever the maker of a row returns."""
        return construct(self._makers[row], f"the environment of {name_of(self._makers[row])}")

    def keep(self, row: int, env: Env) -> None:
        """Have `build` give this one out, once."""
        self._built[row] = env

    def __reduce__(self) -> Any:
        # Built environments stay here. Closures cannot be pickled, and the process of an environment is ours.
        return _load, (cloudpickle.dumps(self._makers),)


def _load(data: bytes) -> MadeEnvs:
    return MadeEnvs(pickle.loads(data))  # noqa: S301 - from our own parent


def _other(made: object) -> str:
    return (
        f"a {type(made).__module__}.{type(made).__name__}; return a gymnasium.Env, or for TorchRL's collectors also a "
        "TorchRL environment without a batch size"
    )


def name_of(maker: Callable[[], Any]) -> str:
    inner = getattr(maker, "maker", maker)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return f"{getattr(inner, '__module__', '?')}:{name}"
