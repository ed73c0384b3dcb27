"""Pinned memory between this process's arrays and a CUDA policy: both copies are asynchronous, one wait a step.

    numpy obs -> pinned -> device         (queued, the CPU goes on)
    device action, outputs -> pinned -> numpy   (queued; then wait for this stream's event, not for the device)

While the CPU waits, the environments of the other EnvGroup step: see `collect/env_group.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cormorant_worker.spaces import Array


class Staging:
    """Buffers for one actor, grown to the largest number of rows seen. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(pinned, on the device), one pair an array."""
        self._down: list[torch.Tensor] = []
        """Pinned, one a tensor."""
        self._done = torch.cuda.Event()

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Copy arrays [n, ...] to the device. The result is valid until the next `upload`."""
        uploaded = []
        for i, array in enumerate(arrays):
            if i == len(self._up) or not _fits(self._up[i][0], array.shape, torch.from_numpy(array).dtype):
                pinned = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
                self._up[i : i + 1] = [(pinned, torch.empty_like(pinned, device=self._device, pin_memory=False))]
            pinned, target = self._up[i]
            n = len(array)
            # The last upload has been read: its action came back before this step began.
            pinned[:n].copy_(torch.from_numpy(array))
            uploaded.append(target[:n].copy_(pinned[:n], non_blocking=True))
        return uploaded

    def download(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """Copy tensors [n, ...] from the device and wait for them. The result is valid until the next `download`."""
        found: list[Array] = []
        for i, given in enumerate(tensors):
            tensor = given.float() if given.dtype == torch.bfloat16 else given
            if i == len(self._down) or not _fits(self._down[i], tensor.shape, tensor.dtype):
                self._down[i : i + 1] = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)]
            found.append(self._down[i][: len(tensor)].copy_(tensor.detach(), non_blocking=True).numpy())
        self._done.record(torch.cuda.current_stream(self._device))
        self._done.synchronize()
        return found


def _fits(buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    return buffer.dtype == dtype and tuple(buffer.shape[1:]) == tuple(shape[1:]) and len(buffer) >= shape[0]


def device_of(policy: Any) -> torch.device:
    """Where a policy's first parameter lies, of a mapping of modules the first one's; the CPU where there is none."""
    for module in policy.values() if isinstance(policy, Mapping) else (policy,):
        if isinstance(module, torch.nn.Module) and (first := next(module.parameters(), None)) is not None:
            return first.device
    return torch.device("cpu")


def as_numpy(value: object) -> Array:
    """A tensor of any device, or anything else that numpy understands, as an array of this process. bfloat16, which
    numpy does not have, becomes float32.

    Raises:
        TypeError: another dtype that numpy does not have.
    """
    if isinstance(value, torch.Tensor):
        # At 8 environments, a `detach` and a `cpu` that change nothing would be a tenth of a policy call.
        tensor = value if value.is_cpu and not value.requires_grad else value.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(value)
