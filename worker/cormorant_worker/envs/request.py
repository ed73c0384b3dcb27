"""Requests of workers and evaluations to a kind of environment, and the protocol of kinds. Each kind is a module in the
table of `kinds.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from cormorant_contract.env import Env, seats_of
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.envs.restarts import RestartLimits
from cormorant_worker.spaces import Array


class Assignment(NamedTuple):
    """Which environment plays which of `env.variants`.

    Only a worker's slot determines it (`cormorant_contract.env.seats_of`): shares hold over a worker group, even
    if each worker has one environment, and a slot keeps its variants when the fleet is scaled, when its worker is
    replaced, and across restores and new seeds.

        weights easy 1, hard 2    seats hard easy hard | hard easy hard ...    workers of 2: (h, e), (h, h), (e, h)
    """

    names: tuple[str, ...]
    """All variants of the manifest."""
    task_ids: Array
    """[B] int64, positions in `names`, ascending: environments of one variant lie side by side."""


def assign(env: Env, *, group_number: int, index: int) -> Assignment | None:
    """Which variants a slot's environments play; None if the manifest has none."""
    if not env.variants:
        return None
    task_ids = seats_of(env.variants, group_number=group_number, index=index, num_envs=env.num_envs)
    return Assignment(tuple(variant.name for variant in env.variants), np.array(task_ids, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRequest:
    """The environments to open, and their share of the machine."""

    env: Env
    """`spec.env`, whose `num_envs` says how many."""
    seeds_of: Callable[[int], Sequence[int]]
    """Returns the seeds of a given number of environments."""
    makers: Sequence[Callable[..., Any]] = ()
    """A script's own, in place of an id or an entrypoint: see `WorkerOverrides.envs`."""
    assignment: Assignment | None = None
    """Which environment plays which variant."""
    limits: RestartLimits = RestartLimits()  # noqa: RUF009 - frozen
    is_served: bool = False
    """Inference servers act for them."""
    max_threads: int = 0
    """0: this process's CPU limit."""
    num_threads: int = 0
    """EnvPool threads that a predecessor's calibration found; 0: calibrate."""
    one_cpu: bool = False
    """A single stepping thread may share the CPU of the thread that calls the policy."""
    max_frames: int = 0
    """Frames after which trajectories are cut; 0: they are not."""
    begins: str = ""
    """Field of `spec.collection` that begins episodes on request; empty: none does."""
    is_filmed: bool = False

    @property
    def seeds(self) -> Sequence[int]:
        return self.seeds_of(self.env.num_envs)

    @property
    def threads(self) -> int:
        """Maximum number of stepping threads."""
        return self.max_threads or available_cpus()

    @property
    def served_groups(self) -> int:
        """Two if inference servers act: the rows of one are at the server while the other steps."""
        return 2 if self.is_served and self.env.num_envs > 1 else 1

    @property
    def info(self) -> tuple[InfoField, ...]:
        return info_fields(self.env)


class OpenedEnvs(NamedTuple):
    groups: Sequence[VectorEnv]
    """One for each EnvGroup."""
    num_threads: int = 0
    """EnvPool threads of each EnvGroup; 0 without EnvPool."""
    pool_threads: frozenset[int] = frozenset()
    """Native ids of the threads that step, where one of them steps all environments."""


class EnvKind(Protocol):
    """A module of one kind of environment."""

    def open_envs(self, request: EnvRequest) -> OpenedEnvs:
        """Open the environments of a worker.

        Raises:
            ManifestError, EnvError: they cannot be built, or not as requested.
        """

    def open_episodes(self, request: EnvRequest, wrap: Callable[[EnvSource], EnvSource]) -> VectorEnv:
        """Open one environment per episode of an evaluation, in lockstep; filmed ones in this process. `wrap` is for
        kinds that build single environments.

        Raises:
            EnvError: they cannot be built.
        """


def info_fields(env: Env) -> tuple[InfoField, ...]:
    return tuple(
        InfoField(key=item.key, dtype=item.dtype or "", shape=item.shape, fill=item.fill) for item in env.info or ()
    )
