"""The parts of a collector: environments as TorchRL's scripts give them, policy, settings, seed and the job."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle
import gymnasium
import numpy as np

from cormorant_compat.arguments import as_count
from cormorant_compat.torchrl.settings import MakerKeywords, broadcast, check_device, devices_of, read_settings
from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.scripted import info_block, script_job

Mode = Literal["sync", "async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPlan:
    mode: Mode
    makers: "tuple[tuple[Maker, ...], ...]"
    """By collector: its environments."""
    policy: Any
    settings: MakerKeywords
    devices: tuple[str, ...]
    """By collector: torch device of its policy; empty if none was given."""
    storing: tuple[str, ...]
    """By collector: device of its batches, in this process."""
    overrides: tuple[Mapping[str, Any], ...]
    """By collector: settings of its own."""
    seed: int
    """Base seed, from which environments and random streams derive theirs, until `set_seed`."""

    @property
    def num_collectors(self) -> int:
        return len(self.makers)

    @property
    def share(self) -> int:
        """Collectors that a batch is of."""
        return self.num_collectors if self.mode == "sync" else 1

    def job(self) -> CollectorJob:
        settings = self.settings
        collection: dict[str, Any] = {
            "mode": self.mode,
            "framesPerBatch": -(-settings["frames_per_batch"] // self.share),
            "initRandomFrames": settings["init_random_frames"],
            "maxFramesPerTrajectory": settings["max_frames_per_traj"],
            "resetAtEachBatch": settings["reset_at_each_iter"],
            "seed": self.seed,
        }
        if settings["total_frames"]:
            collection["totalFrames"] = settings["total_frames"]
        if self.mode == "sync":
            # Nothing is stepped between two batches: the next one is collected with what was learned from this one.
            collection["weights"] = {"maxStaleness": 0}
        # Stands for the makers, which travel beside the job.
        gymnasium = {"entrypoint": "script:environment", "vectorization": settings["vectorization"]}
        return script_job(
            {
                "env": {"gymnasium": gymnasium} | info_block(settings["info"]),
                "policy": {
                    "random": {},
                    "explorationType": str(settings["exploration_type"]),
                    "allowNonfinite": True,  # TorchRL takes any values
                },
                "collection": collection,
                "output": {"queue": {"capacityBatches": 1}},
                "replicas": self.num_collectors,
            }
        )


def make_plan(
    mode: Mode,
    makers: "tuple[tuple[Maker, ...], ...]",
    policy: Any,
    given: Mapping[str, Any],
    *,
    overrides: Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
    is_remote: bool = False,
    stores_here: bool = True,
) -> CollectionPlan:
    """Read the keyword arguments of collectors. `is_remote`: policies may act on other machines, whose devices are not
    known here; `stores_here`: batches come into this process. Raises TypeError and ValueError.
    """
    settings, count = read_settings(given), len(makers)
    env_devices = devices_of(settings["env_device"], "env_device", count, is_remote=is_remote)
    for makers_of_one, device in zip(makers, env_devices, strict=True):
        for maker in makers_of_one:
            maker.device = device
    usual = devices_of(settings["device"], "device", count, is_remote=is_remote)
    own = devices_of(settings["policy_device"], "policy_device", count, is_remote=is_remote)
    storing = devices_of(settings["storing_device"], "storing_device", count, is_remote=False)
    if stores_here:
        storing = tuple(
            one or check_device(other or "cpu", "storing_device (left out, so that of device)")
            for one, other in zip(storing, usual, strict=True)
        )
        if mode == "sync" and len(set(storing)) > 1:
            raise ValueError(f"storing_device {storing} differs between collectors whose batches are stacked; give one")
    return CollectionPlan(
        mode=mode,
        makers=makers,
        policy=policy,
        settings=settings,
        devices=tuple(one or other for one, other in zip(own, usual, strict=True)),
        storing=storing,
        overrides=tuple(overrides) or ({},) * count,
        seed=seed,
    )


def next_seed(seed: int, links: int) -> int:
    """The value that TorchRL's `set_seed` returns after `links` environments: 0 gives 795726461, 2841183792,
    2309840538. A script that seeds several things in turn goes on as it did.
    """
    for _ in range(links):
        seed = int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % ((1 << 32) - 1)
    return seed


def number_of(worker: str) -> int:
    """A collector's number, from its worker's name."""
    return int(worker.rpartition("-")[2])


# -- environments ----------------------------------------------------------------------------------------------


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
        self._is_env = isinstance(maker, gymnasium.Env) or is_torchrl_env(maker)
        if self._is_env and self._kwargs:
            raise TypeError(
                f"env_kwargs {self._kwargs} were given with an environment that is built already "
                f"({type(maker).__name__}); give a callable that builds it"
            )
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
        # Asked of the class: TorchRL's batched environments start when they are asked for what they do not have.
        if isinstance(self.made, gymnasium.Env) or hasattr(type(self.made), "vector_env"):
            return self.made
        if is_torchrl_env(self.made):
            from cormorant_compat.torchrl.adapter import adapt_torchrl

            return adapt_torchrl(self.made)
        kind = type(self.made)
        raise EnvBuildError(
            f"the environment's maker returned a {kind.__module__}.{kind.__name__}; return a TorchRL environment, a "
            "gymnasium.Env or a MultiThreadedEnv"
        )


def share_out(
    env_fns: Any, env_kwargs: Any, num_env_per_collector: int | None, num_collectors: int | None
) -> tuple[tuple[Maker, ...], ...]:
    """The makers of each collector's environments.

        list of n, only collectors given     each has ceil(n / collectors)
        list of n, only per collector given  ceil(n / per collector) collectors
        list, neither given                  one environment a collector
        a callable, both given               collectors * per collector environments
        a callable, one given                the other is 1

    Raises:
        ValueError: numbers that do not fit together.
        TypeError: something that makes no environment.
    """
    per = None if num_env_per_collector is None else as_count(num_env_per_collector, "num_env_per_collector")
    count = None if num_collectors is None else as_count(num_collectors, "num_collectors")
    if isinstance(env_fns, list | tuple):
        n = len(env_fns)
        if not n:
            raise ValueError("the list of environments is empty; give at least one callable that makes an environment")
        if per is None:
            per = 1 if count is None else -(-n // count)
        count = count or -(-n // per)
        if per * count != n:
            raise ValueError(
                f"num_env_per_collector {per} * num_collectors {count} is {per * count}, and env_fns has {n} "
                "environments; the collectors of a fleet have as many each: change one of the three"
            )
        env_fns = list(env_fns)
    else:
        per, count = per or 1, count or 1
        n = per * count
        env_fns = [env_fns] * n
    kwargs = broadcast(env_kwargs, "env_kwargs", n, of="environments")
    made = [Maker(maker, given) for maker, given in zip(env_fns, kwargs, strict=True)]
    return tuple(tuple(made[first : first + per]) for first in range(0, n, per))


def is_torchrl_env(value: object) -> bool:
    """True for TorchRL's: an instance exists only where TorchRL was imported."""
    theirs = sys.modules.get("torchrl.envs")
    return theirs is not None and isinstance(value, theirs.EnvBase)
