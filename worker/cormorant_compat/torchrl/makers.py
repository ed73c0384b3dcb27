"""TorchRL's ways to say which environments: callables, or environments themselves, with keyword arguments."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import gymnasium

from cormorant_worker.envs.gymnasium_env import why_unsupported
from cormorant_worker.errors import EnvBuildError


class Maker:
    """Calls a user's maker with its arguments, in the process where the environment steps. Pickled for it."""

    def __init__(self, maker: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Take a callable, or an environment, which is sent as it is."""
        self.maker = maker
        self.made: Any = None
        """The newest environment that was made in this process."""
        self.device = ""
        """Torch device of a TorchRL environment; empty: as it was made."""
        self._kwargs = dict(kwargs or {})
        self._is_env = is_env(maker)
        if self._is_env and self._kwargs:
            raise TypeError(
                f"env_kwargs {self._kwargs} were given with an environment that is built already "
                f"({type(maker).__name__}); give a callable that builds it"
            )
        if why := "" if self._is_env else why_unsupported(maker):
            raise TypeError(f"{'a callable makes' if callable(maker) else 'an environment is'} {why}")
        if not self._is_env and not callable(maker):
            raise TypeError(
                f"{maker!r} ({type(maker).__name__}) makes no environment; give a callable that returns one"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Bytes, so that each call unpickles an environment of its own.
        maker = cloudpickle.dumps(self.maker) if self._is_env and not isinstance(self.maker, bytes) else self.maker
        return {**self.__dict__, "maker": maker, "made": None}

    def __call__(self) -> Any:
        """A gymnasium.Env, or what has a `vector_env`. Of an environment that was sent: a copy."""
        if isinstance(self.maker, bytes):
            self.made = cloudpickle.loads(self.maker)
        else:
            self.made = self.maker if self._is_env else self.maker(**self._kwargs)
        if self.device and is_torchrl_env(self.made):
            self.made = self.made.to(self.device)
        return adapt(self.made)


class Calls:
    """A user's policy factory, called in the worker; what it returns is read as `as_policy` does, TorchRL's
    `RandomPolicy` as `random_policy` does.
    """

    def __init__(self, factory: Callable[[], Any], *, is_trusted: bool) -> None:
        self._factory = factory
        self._is_trusted = is_trusted

    def __call__(self, observation: Any, action: Any) -> Any:
        from cormorant_compat.torchrl.policy import as_policy, is_random_policy

        made = self._factory()
        if is_random_policy(made):
            from cormorant_compat.torchrl.specs import random_policy

            return random_policy(made, action)
        return as_policy(made, is_trusted=self._is_trusted)


def policy_maker(policy: Any, factory: Callable[[], Any] | None, *, is_trusted: bool) -> Calls | None:
    """What makes a collector's policy from its spaces; None where it is sent as it is."""
    from cormorant_compat.torchrl.policy import is_random_policy

    if factory is None and is_random_policy(policy):
        return Calls(lambda: policy, is_trusted=is_trusted)
    return None if factory is None else Calls(factory, is_trusted=is_trusted)


def is_env(value: object) -> bool:
    """True for an environment, TorchRL's or gymnasium's."""
    return isinstance(value, gymnasium.Env) or is_torchrl_env(value)


def is_torchrl_env(value: object) -> bool:
    """True for TorchRL's: an instance exists only where TorchRL was imported."""
    theirs = sys.modules.get("torchrl.envs")
    return theirs is not None and isinstance(value, theirs.EnvBase)


def adapt(made: Any) -> Any:
    """What a user's maker returned, as our collectors step it."""
    # Asked of the class: TorchRL's batched environments start when they are asked for what they do not have.
    if isinstance(made, gymnasium.Env) or hasattr(type(made), "vector_env"):
        return made
    if is_torchrl_env(made):
        from cormorant_compat.torchrl.adapter import adapt_torchrl

        return adapt_torchrl(made)
    if why := why_unsupported(made):
        raise EnvBuildError(f"the environment's maker returned {why}")
    raise EnvBuildError(
        f"the environment's maker returned a {type(made).__module__}.{type(made).__name__}; return a TorchRL "
        "environment, a gymnasium.Env or a MultiThreadedEnv"
    )
