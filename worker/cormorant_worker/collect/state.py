"""What a collector was doing, as bytes: saved at a batch boundary, restored by an equal collector.

Format: safetensors, arrays by name, JSON in its metadata. Holds the generators, the environments where they can be
saved, first observations, recurrent states, open trajectories, the count of frames, the policy version, and the
normalization statistics of a collector without a fleet. The weights are not in it: they are published again by version.
"""

import json
from typing import Any, Protocol

import numpy as np
import safetensors
import safetensors.numpy
import torch

from cormorant_contract.tensor_file import parse_header
from cormorant_worker.collect.block import Layout
from cormorant_worker.collect.env_group import EnvGroup
from cormorant_worker.collect.moments import BatchMoments
from cormorant_worker.collect.seeding import TorchStream
from cormorant_worker.collect.trajectories import Trajectories
from cormorant_worker.errors import EnvNotSaved, StateError
from cormorant_worker.normalize.book import StatisticsBook
from cormorant_worker.normalize.moments import Statistics
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array
from cormorant_worker.weights.staged import StagedWeights

FORMAT = 1


class Stateful(Protocol):
    """What of a collector is saved and restored."""

    num_envs: int
    env_groups: list[EnvGroup]
    trajectories: Trajectories
    rng: TorchStream
    warmup: RandomActor
    weights: StagedWeights
    moments: BatchMoments | None
    statistics: StatisticsBook | None
    frames: int
    warmup_left: int
    is_first_batch: bool

    def layout(self, num_rows: int) -> Layout: ...


def save_state(collector: Stateful) -> bytes:
    arrays: dict[str, Array] = {"torch_rng": collector.rng.state.numpy()}
    if collector.rng.cuda_state is not None:
        arrays["cuda_rng"] = collector.rng.cuda_state.numpy()
    arrays |= {f"trajectories.{name}": value for name, value in collector.trajectories.state().items()}
    if collector.moments is not None:
        arrays["discounted_returns"] = collector.moments.open_returns.of(collector.trajectories.ids)
    why_not = ""
    try:
        for i, group in enumerate(collector.env_groups):
            arrays |= {f"lane.{i}.{name}": value for name, value in group.state().items()}
    except EnvNotSaved as error:
        why_not = str(error)
    metadata = {
        "format": FORMAT,
        "num_envs": collector.num_envs,
        "layout": _layout_of(collector),
        "frames": collector.frames,
        "warmup_left": collector.warmup_left,
        "is_first_batch": collector.is_first_batch,
        "version": collector.weights.version,
        "envs_saved": not why_not,
        "why_not": why_not,
        "action_rng": collector.warmup.state(),
    }
    if collector.statistics is not None and collector.weights.normalizer is not None:
        metadata["statistics"] = {
            "current": collector.statistics.current.document(),
            "acting": collector.weights.normalizer.statistics.document(),
            "versions": dict(collector.statistics),
        }
    flat = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    data: bytes = safetensors.numpy.save(flat, metadata={"cormorant": json.dumps(metadata)})
    return data


def read_metadata(data: bytes | memoryview) -> dict[str, Any]:
    """What a state says of itself: `envs_saved`, `why_not`, `warmup_left`, ..."""
    try:
        metadata: dict[str, Any] = json.loads(parse_header(data).metadata["cormorant"])
        found, kinds = metadata["format"], [type(metadata.get(name)) for name in ("envs_saved", "warmup_left")]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"this is not a collector's state: {error!r}") from error
    if found != FORMAT:
        raise StateError(f"the state has format {found}, this version reads {FORMAT}")
    if kinds != [bool, int]:
        raise StateError(
            "this is not a collector's state: envs_saved is not true or false, or warmup_left is not a count"
        )
    return metadata


def load_state(collector: Stateful, data: bytes, *, first_trajectory: int, rewinds: bool) -> None:
    """Put a collector where `save_state` found an equal one. Nothing is changed when the state does not fit.

    Args:
        collector: between two batches.
        first_trajectory: open trajectories go on under new ids, from this one; 0: under the saved ids if nothing was
            collected here since.
        rewinds: environments and streams go back to where they were; otherwise they stay, and only counts are restored.

    Raises:
        StateError: not a state, or one of a collector with other environments, spaces or policy outputs.
        Exception: whatever an environment raised that did not take its state. All have begun new episodes then.
    """
    metadata = read_metadata(data)
    try:
        arrays = safetensors.numpy.load(data)
    except safetensors.SafetensorError as error:
        raise StateError(f"this is not a collector's state: {error!r}") from error
    for name, ours in (("num_envs", collector.num_envs), ("layout", _layout_of(collector))):
        if metadata[name] != ours:
            raise StateError(f"the state's {name} is {metadata[name]}, this collector's is {ours}; use the same job")
    if rewinds:
        _rewind(collector, metadata, arrays, first_trajectory=first_trajectory)
    if (book := collector.statistics) is not None and "statistics" in metadata:
        # The saved statistics act from now on, whatever the version of the weights is called here, until newer weights
        # are offered. Weights that are offered again under a saved version get the statistics of that version.
        saved = metadata["statistics"]
        versions = {int(version): Statistics.of_document(document) for version, document in saved["versions"].items()}
        book.reset(Statistics.of_document(saved["current"]), versions)
        acting = Statistics.of_document(saved["acting"])
        if collector.weights.normalizer is not None:
            collector.weights.normalizer.use(acting)
        book.stamp(collector.weights.version, acting)
    collector.frames, collector.warmup_left = metadata["frames"], metadata["warmup_left"]


def _rewind(collector: Stateful, metadata: dict[str, Any], arrays: dict[str, Array], *, first_trajectory: int) -> None:
    trajectories, saved = collector.trajectories, _under(arrays, "trajectories.")
    has_envs = metadata["envs_saved"]
    keeps_ids = has_envs and not first_trajectory and (not collector.frames or trajectories.is_at(saved))
    if has_envs:
        try:
            for i, env_group in enumerate(collector.env_groups):
                env_group.restore(_under(arrays, f"lane.{i}."))
        except BaseException:
            # Some of the environments may have gone back and others not.
            for env_group in collector.env_groups:
                env_group.restart()
            raise
    collector.rng.state = torch.from_numpy(arrays["torch_rng"].copy())
    if collector.rng.cuda_state is not None and "cuda_rng" in arrays:
        collector.rng.cuda_state = torch.from_numpy(arrays["cuda_rng"].copy())
    trajectories.skip_to(first_trajectory)
    trajectories.restore(saved, keeps_ids=keeps_ids)
    if collector.moments is not None and "discounted_returns" in arrays:
        collector.moments.open_returns.go_on(trajectories.ids, arrays["discounted_returns"])
    collector.warmup.restore(metadata["action_rng"])
    collector.is_first_batch = metadata["is_first_batch"]
    if not has_envs:
        for env_group in collector.env_groups:
            env_group.restart()


def _under(arrays: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _layout_of(collector: Stateful) -> str:
    layout = collector.layout(1)
    leaves = (*layout.observation, *layout.action, *layout.outputs, *layout.states, *layout.info)
    return "; ".join(f"{'.'.join(leaf.key)} {leaf.dtype.name}{list(leaf.shape)}" for leaf in leaves)
