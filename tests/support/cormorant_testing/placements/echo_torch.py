"""The environment of the placements as a vector of torch tensors, as simulators on a device return them."""

from typing import Any

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from cormorant_testing.placements.echo_env import EchoEnv


class TorchEchoes(SyncVectorEnv):
    """Takes and returns torch tensors; final observations of a reset in the same step are a tensor of all rows, too."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options:
            options = {"reset_mask": options["reset_mask"].numpy()}
        return tensors(super().reset(seed=seed, options=options))

    def step(self, actions: torch.Tensor) -> Any:
        obs, *columns, info = tensors(super().step(actions.numpy()))
        if (final := info.get("final_obs")) is not None and isinstance(obs, torch.Tensor):
            info["final_obs"] = torch.stack([torch.zeros(5) if row is None else torch.from_numpy(row) for row in final])
        return (obs, *columns, info)


class WholeTorchEchoes(TorchEchoes):
    """Resets all rows, or none."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        assert not options, "no options"
        return super().reset(seed=seed)


def tensors(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: tensors(value) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(map(tensors, values))
    return values if values.dtype == object else torch.from_numpy(values)


def make_vector(num_envs: int, mode: str) -> Any:
    """Entrypoint of the manifests."""
    kind = WholeTorchEchoes if mode == "whole" else TorchEchoes
    return kind([EchoEnv] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
