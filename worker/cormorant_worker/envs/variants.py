"""Gymnasium environments of several variants in one vector, and what messages say of variants.

Imported in the processes of environments, so without the contract.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cormorant_worker.envs.gymnasium_env import Env, EnvFactory
from cormorant_worker.errors import EnvBuildError, UnknownEnv
from cormorant_worker.spaces import Space, describe


@contextmanager
def naming(variant: str) -> Iterator[None]:
    """Begin the errors of an environment with the name of its variant, if it has one."""
    try:
        yield
    except (UnknownEnv, EnvBuildError) as error:
        if not variant:
            raise
        raise type(error)(f"variant {variant}: {error}") from error


def check_spaces(found: Mapping[str, tuple[Space, Space]]) -> None:
    """Refuse variants of different spaces. `found`: observation and action space by the variant's name."""
    words = {name: _words(*spaces) for name, spaces in found.items()}
    (first, wanted), *others = words.items()
    for name, has in others:
        if has != wanted:
            raise EnvBuildError(
                f"variants {first} and {name} of spec.env.variants have different spaces: {first} has {wanted}; {name} "
                f"has {has}; use kwargs or tasks whose spaces agree"
            )


def _words(observation: Space, action: Space) -> str:
    return f"observations {describe(observation)}, actions {describe(action)}"


class VariantEnvs:
    """Builds gymnasium environments, each of its variant. Pickled for every process that builds one."""

    def __init__(self, factories: tuple[EnvFactory, ...], names: tuple[str, ...], task_ids: Sequence[int]) -> None:
        """Keep what to build. `task_ids`: for each row, the position of its variant."""
        self._factories, self._names, self._task_ids = factories, names, tuple(task_ids)
        self._spaces: dict[str, tuple[Space, Space]] = {}

    @property
    def name(self) -> str:
        return " | ".join(dict.fromkeys(self._factories[task_id].name for task_id in self._task_ids))

    def called(self, row: int) -> str:
        return f"environment {row} (variant {self._names[self._task_ids[row]]})"

    def build(self, row: int) -> Env:
        """Construct the environment of a row."""
        task_id = self._task_ids[row]
        name = self._names[task_id]
        with naming(name):
            env = self._factories[task_id].build()
        self._spaces[name] = env.observation_space, env.action_space
        try:
            check_spaces(self._spaces)
        except EnvBuildError:
            env.close()
            raise
        return env
