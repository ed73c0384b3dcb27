"""A collector's place in its fleet, and its share of the machine. Imports little, because fleets also import it."""

from dataclasses import dataclass

import torch

from cormorant_worker.collect.seeding import SeedPath
from cormorant_worker.errors import DeviceUnavailable
from cormorant_worker.inference.address import ServerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace(SeedPath):
    group: str = "local"
    env_restarts: int = 0
    """Environments that workers of this slot restarted in the last minutes: they count towards its limit."""
    warmup_frames: int = -1
    """Random frames that this worker begins with; -1: all of the manifest's `initRandomFrames`."""
    max_threads: int = 0
    """EnvPool threads at most; 0 = this process's CPU limit."""
    num_threads: int = 0
    """EnvPool threads that a predecessor's calibration found; 0 = calibrate."""
    device: str = "cpu"
    """Torch device of the policy."""
    servers: tuple[ServerAddress, ...] = ()
    """Addresses of this worker's inference servers, the preferred one first; empty: it calls its own policy."""
    is_server: bool = False

    @property
    def attempt_name(self) -> str:
        """Name of this worker attempt, e.g. `cpu-0-1`: its folder in a dataset."""
        return f"{self.group}-{self.index}-{self.attempt}"


def find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailable(f'torch knows no device "{name}"; use "cpu", "cuda" or "cuda:1"') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable(
            f"device {name} was requested but torch finds no CUDA device; give the worker group a GPU "
            "(resources.limits, on a node that has one) or set its device: cpu"
        )
    return device


def egl_device(index: int, *, visible: str) -> str:
    """EGL's number of a CUDA device of this process. EGL counts all devices of the machine, ignoring
    CUDA_VISIBLE_DEVICES (`visible`).
    """
    names = visible.split(",")
    return names[index] if index < len(names) and names[index].isdigit() else str(index)


def spread(name: str, number: int, *, num_devices: int) -> str:
    """Device of the n-th worker, spread over the machine's devices."""
    return f"{name}:{number % num_devices}" if name == "cuda" and num_devices > 1 else name
