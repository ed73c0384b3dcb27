"""TorchRL's collector helpers: `sync_sync_collector`, `sync_async_collector`, `make_collector_onpolicy`,
`make_collector_offpolicy` and their configs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cormorant_compat.torchrl.collector import FleetCollector
from cormorant_compat.torchrl.makers import share_out
from cormorant_compat.torchrl.plan import CollectionPlan, Mode
from cormorant_compat.torchrl.settings import read_settings
from cormorant_postproc import MultiStep


def sync_sync_collector(
    env_fns: Any,
    env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    num_env_per_collector: int | None = None,
    num_collectors: int | None = None,
    policy: Any = None,
    **kwargs: Any,
) -> FleetCollector:
    """Collectors that are waited for: one batch from all of them, and nothing is stepped until the next is asked for.

    Args:
        env_fns: a callable that makes one environment, or a list of them, which may differ.
        env_kwargs: keyword arguments of the callables: for all, or for each.
        num_env_per_collector: environments of each collector.
        num_collectors: processes.
        policy: a TensorDictModule, a module, a callable; None: random actions.
        **kwargs: see `CollectorSettings`.

    Raises:
        ValueError, TypeError: arguments that cannot be; before anything starts.
        WorkerFailed: a collector cannot start.
    """
    return _make("sync", env_fns, env_kwargs, num_env_per_collector, num_collectors, policy, kwargs)


def sync_async_collector(
    env_fns: Any,
    env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    num_env_per_collector: int | None = None,
    num_collectors: int | None = None,
    policy: Any = None,
    **kwargs: Any,
) -> FleetCollector:
    """Collectors that go on while the learner learns: batches as they come, first ready, first served.

    Arguments and errors are those of `sync_sync_collector`.
    """
    return _make("async", env_fns, env_kwargs, num_env_per_collector, num_collectors, policy, kwargs)


def _make(
    mode: Mode,
    env_fns: Any,
    env_kwargs: Any,
    per: int | None,
    count: int | None,
    policy: Any,
    kwargs: Mapping[str, Any],
    seed: int = 0,
) -> FleetCollector:
    makers = share_out(env_fns, env_kwargs, per, count)
    settings = read_settings(kwargs, num_collectors=len(makers))
    return FleetCollector(CollectionPlan(mode=mode, makers=makers, policy=policy, settings=settings, seed=seed))


@dataclass
class OnPolicyCollectorConfig:
    """What `make_collector_onpolicy` reads; any object with these attributes will do."""

    collector_device: Any = field(default_factory=lambda: ["cpu"])
    """Torch device of policy and batches, or one for each collector."""
    pin_memory: bool = False
    frames_per_batch: int = 1000
    """Frames of a batch, of all environments together."""
    total_frames: int = 50_000_000
    """Frames in all. An environment that repeats actions counts each action once."""
    num_workers: int = 32
    """Environments that `make_env` gives in all."""
    env_per_collector: int = 8
    """Environments that each call of `make_env` gives: there are ceil(num_workers / env_per_collector) collectors."""
    seed: int = 42
    """What all environments and streams derive theirs from."""
    exploration_type: str = "random"
    """random | mode | mean | deterministic."""
    async_collection: bool = False
    """Go on collecting while the learner learns; off-policy only."""
    max_frames_per_traj: int = -1
    """Frames after which a trajectory is cut; -1: never."""
    gamma: float = 0.99


@dataclass
class OffPolicyCollectorConfig(OnPolicyCollectorConfig):
    multi_step: bool = False
    """Sum rewards over `n_steps_return` steps."""
    n_steps_return: int = 3
    init_random_frames: int = 50_000
    """The first frames have random actions."""


def make_collector_onpolicy(
    make_env: Callable[..., Any],
    actor_model_explore: Any,
    cfg: Any,
    make_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
) -> FleetCollector:
    """A collector that is waited for, whose trajectories come split.

    Args:
        make_env: makes the environment of one collector.
        actor_model_explore: the policy.
        cfg: an OnPolicyCollectorConfig, or anything with its attributes. It is not changed.
        make_env_kwargs: keyword arguments of `make_env`: for all, or for each collector.

    Raises:
        ValueError: numbers that do not fit, fewer num_workers than env_per_collector among them.
    """
    return _make_from(cfg, make_env, actor_model_explore, make_env_kwargs, is_off_policy=False)


def make_collector_offpolicy(
    make_env: Callable[..., Any],
    actor_model_explore: Any,
    cfg: Any,
    make_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
) -> FleetCollector:
    """A collector for off-policy learners: asynchronous if `cfg.async_collection`, with multi-step rewards if
    `cfg.multi_step`. Arguments and errors are those of `make_collector_onpolicy`.
    """
    return _make_from(cfg, make_env, actor_model_explore, make_env_kwargs, is_off_policy=True)


def _make_from(cfg: Any, make_env: Any, policy: Any, env_kwargs: Any, *, is_off_policy: bool) -> FleetCollector:
    workers, per = int(cfg.num_workers), int(cfg.env_per_collector)
    if workers < 1 or per < 1 or workers < per:
        raise ValueError(
            f"num_workers {workers} and env_per_collector {per}: there must be at least as many environments as one "
            "collector has, and one at least"
        )
    if (seed := int(cfg.seed)) < 0:
        raise ValueError(f"seed {seed} cannot be: seeds begin at 0")
    kwargs: dict[str, Any] = {
        "max_frames_per_traj": getattr(cfg, "max_frames_per_traj", -1),
        "frames_per_batch": cfg.frames_per_batch,
        "total_frames": cfg.total_frames,
        "device": cfg.collector_device,
        "storing_device": cfg.collector_device,
        "split_trajs": True,
        "exploration_type": cfg.exploration_type,
        "pin_memory": getattr(cfg, "pin_memory", False),
    }
    mode: Mode = "sync"
    if is_off_policy:
        mode = "async" if cfg.async_collection else "sync"
        kwargs["init_random_frames"] = cfg.init_random_frames
        if cfg.multi_step:
            kwargs["postproc"] = MultiStep(gamma=getattr(cfg, "gamma", 0.99), n_steps=cfg.n_steps_return)
    return _make(mode, make_env, env_kwargs, 1, -(-workers // per), policy, kwargs, seed)
