"""A collector's state as bytes: saved at a batch boundary, restored by an equal collector.

Format: safetensors, arrays by name, JSON in its metadata. Holds the generators, the environments where they can be
saved, first observations, recurrent states, open trajectories, the count of frames, the policy version, and the
normalization statistics of a collector without a fleet. The weights are not in it: they are published again by version.
"""

import json
from typing import Any

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


class Saveable:
    """Saves and restores a `Collector`, which sets the attributes declared here."""

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

    def layout(self, num_rows: int) -> Layout:
        raise NotImplementedError

    def state(self) -> bytes:
        """Everything that is needed to continue from this batch boundary."""
        arrays: dict[str, Array] = {"torch_rng": self.rng.state.numpy()}
        if self.rng.cuda_state is not None:
            arrays["cuda_rng"] = self.rng.cuda_state.numpy()
        arrays |= {f"trajectories.{name}": value for name, value in self.trajectories.state().items()}
        if self.moments is not None:
            arrays["discounted_returns"] = self.moments.open_returns.of(self.trajectories.ids)
        why_not = ""
        try:
            for i, group in enumerate(self.env_groups):
                arrays |= {f"lane.{i}.{name}": value for name, value in group.state().items()}
        except EnvNotSaved as error:
            why_not = str(error)
        metadata = {
            "format": FORMAT,
            "num_envs": self.num_envs,
            "layout": self._describe_layout(),
            "frames": self.frames,
            "warmup_left": self.warmup_left,
            "is_first_batch": self.is_first_batch,
            "version": self.weights.version,
            "envs_saved": not why_not,
            "why_not": why_not,
            "action_rng": self.warmup.state(),
        }
        if self.statistics is not None and self.weights.normalizer is not None:
            metadata["statistics"] = {
                "current": self.statistics.current.document(),
                "acting": self.weights.normalizer.statistics.document(),
                "versions": dict(self.statistics),
            }
        flat = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
        data: bytes = safetensors.numpy.save(flat, metadata={"cormorant": json.dumps(metadata)})
        return data

    def restore(self, state: bytes, *, first_trajectory: int = 0, rewinds: bool = True) -> None:
        """Continue from a `state()` of an equal collector, between two batches. If the state does not fit,
        nothing is changed.

        Where environments can be saved (gymnasium environments with `get_state` and `set_state`), the frames that
        follow are bit-identical except for trajectory ids. No id is used twice: open trajectories continue under new
        ids unless nothing was collected here since. Other environments, such as EnvPool's, begin new episodes.

        Args:
            first_trajectory: for fleets: first of the new ids under which open trajectories continue; 0: they keep
                the saved ids if nothing was collected here since.
            rewinds: False leaves environments and random streams as they are and restores only counts and statistics.

        Raises:
            StateError: not a state, or one of a collector with other environments, spaces or policy outputs; or an
                environment refused its state, and all environments have begun new episodes.
        """
        metadata = read_metadata(state)
        try:
            arrays = safetensors.numpy.load(state)
        except safetensors.SafetensorError as error:
            raise StateError(f"this is not a collector's state: {error!r}") from error
        for name, ours in (("num_envs", self.num_envs), ("layout", self._describe_layout())):
            if metadata[name] != ours:
                raise StateError(
                    f"the state's {name} is {metadata[name]}, this collector's is {ours}; use the same job"
                )
        if rewinds:
            self._rewind(metadata, arrays, first_trajectory=first_trajectory)
        if (book := self.statistics) is not None and "statistics" in metadata:
            # The saved statistics act from now on, whatever the version of the weights is called here, until newer
            # weights are offered. Weights that are offered again under a saved version get that version's statistics.
            saved = metadata["statistics"]
            versions = {int(version): Statistics.of_document(of) for version, of in saved["versions"].items()}
            book.reset(Statistics.of_document(saved["current"]), versions)
            acting = Statistics.of_document(saved["acting"])
            if self.weights.normalizer is not None:
                self.weights.normalizer.use(acting)
            book.stamp(self.weights.version, acting)
        self.frames, self.warmup_left = metadata["frames"], metadata["warmup_left"]

    def _rewind(self, metadata: dict[str, Any], arrays: dict[str, Array], *, first_trajectory: int) -> None:
        trajectories, saved = self.trajectories, _under(arrays, "trajectories.")
        has_envs = metadata["envs_saved"]
        keeps_ids = has_envs and not first_trajectory and (not self.frames or trajectories.is_at(saved))
        if has_envs:
            try:
                for i, env_group in enumerate(self.env_groups):
                    env_group.restore(_under(arrays, f"lane.{i}."))
            except BaseException:
                # Some of the environments may have gone back and others not.
                for env_group in self.env_groups:
                    env_group.restart()
                raise
        self.rng.state = torch.from_numpy(arrays["torch_rng"].copy())
        if self.rng.cuda_state is not None and "cuda_rng" in arrays:
            self.rng.cuda_state = torch.from_numpy(arrays["cuda_rng"].copy())
        trajectories.skip_to(first_trajectory)
        trajectories.restore(saved, keeps_ids=keeps_ids)
        if self.moments is not None and "discounted_returns" in arrays:
            self.moments.open_returns.go_on(trajectories.ids, arrays["discounted_returns"])
        self.warmup.restore(metadata["action_rng"])
        self.is_first_batch = metadata["is_first_batch"]
        if not has_envs:
            for env_group in self.env_groups:
                env_group.restart()

    def _describe_layout(self) -> str:
        layout = self.layout(1)
        leaves = (*layout.observation, *layout.action, *layout.outputs, *layout.states, *layout.info)
        return "; ".join(f"{'.'.join(leaf.key)} {leaf.dtype.name}{list(leaf.shape)}" for leaf in leaves)


def read_metadata(data: bytes | memoryview) -> dict[str, Any]:
    """Metadata of a state: `envs_saved`, `why_not`, `warmup_left`, ..."""
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


def _under(arrays: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
