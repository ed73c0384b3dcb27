"""Keyword arguments of TorchRL's collectors, those of RayCollector among them, read and checked before the start."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypedDict, cast

import torch

from cormorant_compat.arguments import Devices, Extendable, as_count, as_flag, plain, room_of
from cormorant_contract.base import COUNT_MAX
from cormorant_worker.fleet.options import RayOptions
from cormorant_worker.policy.exploration import ExplorationType

MEANINGLESS = (
    "auto_register_policy_transforms", "extend_buffer", "no_cuda_sync", "num_sub_threads", "num_threads",
    "return_same_td", "use_buffers", "use_env_creator", "weight_sync_schemes",
)  # fmt: skip
"""Arguments about how TorchRL's own collectors work; taken, and without a meaning here: states of recurrent policies
are carried for them in any case, buffers are extended once per batch, and weights travel in one way."""

_DEFAULTS = {
    "cat_results": "stack",
    "preemptive_threshold": 1,
    "reset_when_done": True,
    "track_traj_ids": True,
    "weight_recv_schemes": {},
}
"""Arguments of TorchRL's collectors that have no meaning here, and their defaults. Others have None or False."""

Hook = Callable[..., Any]


class CollectorKeywords(TypedDict, total=False):
    """How to collect. Names and meanings are TorchRL's; `docs/how-to/migrating-from-torchrl.md` has them all."""

    total_frames: int | None
    """Frames in all; None or -1: no limit. Rounded up to whole steps, else exact."""
    max_frames_per_traj: int | None
    """Frames after which a trajectory is cut, truncated; None, 0 or less: never."""
    init_random_frames: int | None
    """The first frames, over all collectors, have random actions; None, 0 or less: none."""
    reset_at_each_iter: bool
    """Begin every batch with new episodes."""
    split_trajs: bool | None
    """Give trajectories as padded rows with `("collector", "mask")`."""
    postproc: Hook | None
    """Called with each batch, after splitting; its result is what is handed out."""
    exploration_type: str | Enum
    """random | mode | mean | deterministic, or TorchRL's ExplorationType."""
    device: "Devices | None"
    """Torch device of the policies, or one for each collector; batches are stored there unless storing_device says
    otherwise."""
    storing_device: "Devices | None"
    """Torch device on which batches are handed out, or one for each collector."""
    env_device: "Devices | None"
    """Torch device of TorchRL's environments, or one for each collector; None: where their maker put them. Other
    environments step on the CPU."""
    policy_device: "Devices | None"
    """Torch device of the policies alone."""
    trajs_per_batch: int | None
    """Hand out batches of so many whole episodes, `[N, longest]`, padded, with `("collector", "mask")`."""
    traj_format: Literal["padded", "cat"] | None
    """"cat": episodes of `trajs_per_batch` one after the other, `[frames]`."""
    compact_obs: bool
    """Leave observations and states out of `next`: the next frame has them, unless a trajectory ended."""
    replay_buffer: Extendable | None
    """Extended with each batch, `[environments, time]` where its storage has two dimensions, else with single frames;
    iteration gives None."""
    pre_collect_hook: Hook | None
    """Called without arguments before each batch is waited for."""
    post_collect_hook: Hook | None
    """Called with each batch before it is handed out."""
    trust_policy: bool | None
    """The policy takes TensorDicts, whatever its argument is called."""
    policy_factory: Hook | Sequence[Hook] | None
    """Makes the policy in each collector: a callable, or one for each. A policy beside it is the source of weights."""
    pin_memory: bool
    """Batches lie in pinned memory, where there is a CUDA device to pin them for."""
    vectorization: Literal["subprocess", "inline"]
    """Ours: several environments of one collector each in a process of its own, or all in the collector's."""
    info: Sequence[str | Mapping[str, Any]]
    """Ours: keys of gymnasium environments' info that are stored at the root of `next`, or items of `spec.env.info`."""


class MakerKeywords(CollectorKeywords, total=False):
    frames_per_batch: int
    """Frames of a batch: of all collectors together in sync mode, of each in async mode; rounded up to whole steps."""


_NAMES = tuple(MakerKeywords.__annotations__)
_FLAGS = tuple(name for name, kind in MakerKeywords.__annotations__.items() if kind in (bool, bool | None))
_USUAL: MakerKeywords = {
    "frames_per_batch": 200,
    "exploration_type": "random",
    "vectorization": "subprocess",
    "info": (),
}
"""Where something is meant by leaving an argument out; flags are False then, others None."""
_ANY_SIGN = ("max_frames_per_traj", "init_random_frames")
"""Numbers of which 0 and less mean none."""


def read_settings(given: Mapping[str, Any]) -> MakerKeywords:
    """Check keyword arguments, and complete them: None means left out, and limits that are none become 0. Raises
    TypeError for an argument that collectors here do not have, and ValueError for an invalid value.
    """
    meant = {name: plain(value) for name, value in given.items() if name in _NAMES or not _says_nothing(name, value)}
    if unknown := sorted(set(meant) - set(_NAMES)):
        raise TypeError(f"collectors have no argument {unknown[0]}={meant[unknown[0]]!r}; known: {', '.join(_NAMES)}")
    values: dict[str, Any] = {**dict.fromkeys(_NAMES), **dict.fromkeys(_FLAGS, False), **_USUAL}
    values |= {name: value for name, value in meant.items() if value is not None}
    for name in _FLAGS:
        values[name] = as_flag(values[name], name)
    for name in ("frames_per_batch", "total_frames", "trajs_per_batch", *_ANY_SIGN):
        if values[name] is not None and not (values[name] == -1 and name == "total_frames"):
            as_count(values[name], name, least=-sys.maxsize if name in _ANY_SIGN else 1)
    for name in ("total_frames", *_ANY_SIGN):
        values[name] = limit(values[name])
    settings = cast("MakerKeywords", values)
    _check(settings)
    settings["exploration_type"] = exploration_of(settings["exploration_type"])
    return settings


def _says_nothing(name: str, value: Any) -> bool:
    return name in MEANINGLESS or value is None or (value == _DEFAULTS[name] if name in _DEFAULTS else value is False)


def _check(settings: MakerKeywords) -> None:
    count, form = settings["trajs_per_batch"], settings["traj_format"]
    if form not in (None, "padded", "cat"):
        raise ValueError(f"traj_format must be 'padded' or 'cat', found {form!r}")
    if count is None and form == "cat":
        raise ValueError('traj_format "cat" is how whole episodes are handed out; give trajs_per_batch')
    if count is not None and settings["split_trajs"]:
        raise ValueError("trajs_per_batch gives whole episodes, which come split already; leave split_trajs out")
    most, frames = room_of(settings["replay_buffer"])[0], settings["frames_per_batch"]
    # How much a postproc leaves of a batch is unknown.
    if most is not None and settings["postproc"] is None and frames > most:
        raise ValueError(
            f"replay_buffer holds {most:,} frames and frames_per_batch is {frames:,}: the first would be "
            "overwritten before they are read; make it larger, or frames_per_batch smaller"
        )


def exploration_of(given: Any) -> ExplorationType:
    """Our exploration type, from a string or from TorchRL's."""
    name = str(getattr(given, "name", given)).rpartition(".")[2].lower()
    try:
        return ExplorationType(name)
    except ValueError:
        known = ", ".join(ExplorationType)
        raise ValueError(f'exploration_type "{name}" is not known; use one of {known}') from None


def broadcast(given: Any, name: str, count: int, *, of: str = "collectors") -> list[Any]:
    """One value for each collector, or whatever there are `count` of, from one for all or a list of as many."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{name} has {len(given)} entries for {count} {of}; give as many, or one for all")
    return list(given)


def limit(value: int | None) -> int:
    """A number of frames; 0 for any spelling of "no limit". What the counter cannot hold becomes its maximum."""
    return min(value, COUNT_MAX) if value is not None and value > 0 else 0


def check_device(given: Any, name: str, *, is_remote: bool = False) -> str:
    """A device as torch writes it, "" if none was given. `is_remote`: of a machine whose devices are not known here."""
    if given is None:
        return ""
    try:
        device = torch.device(given)
        if device.type == "cuda" and not is_remote:  # counted: a tensor would take memory of the device
            if (device.index or 0) >= (count := torch.cuda.device_count()):
                raise RuntimeError(f"torch finds {count} CUDA devices")  # noqa: TRY301  # one sentence for all
        elif not is_remote:
            torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError, ImportError) as error:
        why = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise ValueError(f"{name} {given!r} cannot be used here: {why}; use another, or cpu") from error
    return str(device)


def devices_of(given: Any, name: str, num_collectors: int, *, is_remote: bool) -> tuple[str, ...]:
    """One device for each collector, "" if none was given."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if len(several) not in (1, num_collectors):
        raise ValueError(f"{name} has {len(several)} devices for {num_collectors} collectors; give as many, or one")
    checked = tuple(check_device(one, name, is_remote=is_remote) for one in several)
    return checked * num_collectors if len(several) == 1 else checked


# -- what only RayCollector has --------------------------------------------------------------------------------

_COLLECTING = {
    "max_frames_per_traj": "max_frames_per_trajectory",
    "init_random_frames": "init_random_frames",
    "reset_at_each_iter": "reset_at_each_batch",
    "exploration_type": "exploration_type",
}
"""Settings that each collector may have of its own, and the fields of its `CollectorConfig`."""
_SHARED = ("split_trajs", "postproc", "trust_policy")
"""Settings of all collectors."""
_DEVICES = ("device", "storing_device", "policy_device", "env_device")
_ACTOR = ("accelerator_type", "label_selector", "memory", "num_cpus", "num_gpus", "object_store_memory", "resources",
          "runtime_env", "scheduling_strategy")  # fmt: skip


def check_class(collector_class: Any) -> None:
    """TorchRL's `collector_class`: here each collector is one process that steps its environments together."""
    home = getattr(collector_class, "__module__", "").partition(".")[0]
    if not isinstance(collector_class, str | None) and home not in ("torchrl", "cormorant_compat"):
        raise TypeError(
            f"collector_class {collector_class!r} is none of TorchRL's collectors; leave it out: each collector is a "
            "process that steps its environments together"
        )


def own_settings(
    collector_kwargs: Any, *, num_collectors: int, given: dict[str, Any]
) -> tuple[dict[str, Any], tuple[Mapping[str, Any], ...]]:
    """Read `collector_kwargs`: a mapping, or a list with one for each collector. Returns keyword arguments for all,
    devices of each among them, in which they take the place of `given`; and each collector's own fields of
    `CollectorConfig`. Raises TypeError for an argument that a collector cannot have of its own, and ValueError for a
    list of another length, or a value that cannot be.
    """
    each = [
        {name: value for name, value in (one or {}).items() if name not in MEANINGLESS}
        for one in broadcast(collector_kwargs, "collector_kwargs", num_collectors)
    ]
    shared = _SHARED if isinstance(collector_kwargs, Mapping) else ()
    known = (*_COLLECTING, *_DEVICES, *shared)
    if unknown := sorted({name for one in each for name in one} - set(known)):
        raise TypeError(f"collector_kwargs have no {unknown[0]}; known: {', '.join(known)}")
    result = {**given, **{name: each[0][name] for name in shared if name in each[0]}}
    for name in _DEVICES:
        if any(name in one for one in each):
            usual = broadcast(given.get(name), name, num_collectors)
            result[name] = [one.get(name, usual[i]) for i, one in enumerate(each)]
    overrides = []
    for one in each:
        own = {name: one[name] for name in _COLLECTING if name in one}
        overrides.append({_COLLECTING[name]: value for name, value in read_settings(own).items() if name in own})
    return result, tuple(overrides)


def is_connected() -> bool:
    """True where this process belongs to a Ray cluster already. Who does has imported Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def ray_options(init: Mapping[str, Any] | None, remote: list[Mapping[str, Any]]) -> RayOptions:
    """How to connect, and what each actor asks for. `init`: arguments of `ray.init`; without an address RAY_ADDRESS
    counts. A process that is connected keeps its connection and its runtime environment. `remote`: arguments of
    `ray.remote`, for each collector; the list may grow.
    """
    arguments = dict(init or {})
    runtime_env = arguments.pop("runtime_env", None)
    address = arguments.pop("address", None) or (None if is_connected() else os.environ.get("RAY_ADDRESS") or None)
    return RayOptions(
        address=None if address == "local" else address,
        runtime_env={} if is_connected() else runtime_env or {},
        actors=remote,
        init=arguments,
    )


def remote_options(remote_configs: Any, num_collectors: int) -> list[Mapping[str, Any]]:
    each = [dict(one or {}) for one in broadcast(remote_configs, "remote_configs", num_collectors)]
    for one in each:
        if unknown := sorted(set(one) - set(_ACTOR)):
            raise ValueError(
                f"remote_configs have {', '.join(unknown)}, which the fleet sets itself or Ray does not know; "
                f"collectors take {', '.join(_ACTOR)}"
            )
    return list(each)


def read_updater(given: Any) -> Any:
    """A `weight_updater`: the object itself, or what a callable makes."""
    is_maker = callable(given) and (isinstance(given, type) or not hasattr(given, "push_weights"))
    return given() if is_maker else given
