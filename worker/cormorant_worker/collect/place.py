"""A collector's place in its fleet: its seeds, its device, its share of the machine. Imports little, as fleets also
import it.

No two environments of a fleet share a random stream, and replacements never repeat their predecessors' streams. Streams
of a worker's own (policy noise, random actions) come from numpy's SeedSequence with spawn keys:
https://numpy.org/doc/stable/reference/random/parallel.html. EnvPool takes 31-bit seeds, where independent draws would
collide by chance; environments are therefore numbered over the whole fleet, and the numbers shuffled one to one.
"""

import random
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from cormorant_worker.errors import DeviceUnavailable
from cormorant_worker.inference.address import ServerAddress

_BITS = 31
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """A worker's place in the fleet. The fields down to `num_groups` fix every random stream of that worker."""

    seed: int = 0
    """The manifest's seed, or the one that replaced it."""
    index: int = 0
    """The slot's index within its group."""
    attempt: int = 0
    """The n-th stream of the slot in its epoch, from 0: a new process gets a new one, and so does a state that is
    restored with new streams."""
    epoch: int = 0
    """The n-th fleet of the job, from 0."""
    group_number: int = 0
    """The group's position in the manifest, from 0."""
    num_groups: int = 1
    first_trajectory: int = 0
    """Lower bound of trajectory ids; 0: derived from the other fields."""
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

    def sequence(self, purpose: str) -> np.random.SeedSequence:
        """The seed sequence of one purpose ("policy", "actions") of this worker."""
        key: tuple[int, ...] = (self.group_number, self.index, self.attempt, zlib.crc32(purpose.encode()))
        key += (self.epoch,) if self.epoch else ()
        return np.random.SeedSequence(self.seed, spawn_key=key)

    def seed_of(self, purpose: str) -> int:
        """One 63-bit seed for a purpose, for example torch's generator."""
        return int(self.sequence(purpose).generate_state(1, np.uint64)[0] >> np.uint64(1))

    def env_seeds(self, num_envs: int) -> list[int]:
        """One 31-bit seed for each environment; all distinct over slots and attempts of an epoch. Seeds of two epochs
        are independent: a pair of them is the same with a chance of 2^-31.

        Slots and attempts are numbered diagonal by diagonal (Cantor's pairing), so that the numbers stay small in
        both directions: 1,000 slots of 64 environments with 100 attempts each use 2 % of the 2^31 seeds. Past 2^31
        the numbers wrap round.
        """
        slot = self.index * self.num_groups + self.group_number
        diagonal = slot + self.attempt
        first = (diagonal * (diagonal + 1) // 2 + self.attempt) * num_envs
        key = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        seeds = [_shuffle(first + env, key) for env in range(num_envs)]
        if not self.epoch:
            return seeds
        other = int(np.random.SeedSequence(self.seed, spawn_key=(self.epoch,)).generate_state(1)[0]) & _MASK
        return [_shuffle(seed ^ other, key) for seed in seeds]


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


def seed_globals(seeds: WorkerPlace) -> None:
    """Seed numpy's and Python's own generators, for environments and policies that draw from them. Only for processes
    that are a worker's alone.
    """
    np.random.seed(seeds.sequence("numpy").generate_state(4))
    random.seed(seeds.seed_of("python"))


class TorchStream:
    """Torch's global generators as a stream of one collector: swapped in around a batch, so that collecting in the
    learner's process neither disturbs the learner's numbers nor depends on them.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self.state = torch.Generator().manual_seed(seed).get_state()
        self._outside = self.state
        self.cuda_state = torch.Generator(device).manual_seed(seed).get_state() if device.type == "cuda" else None
        self._cuda_outside = self.cuda_state

    def __enter__(self) -> None:
        self._outside = torch.random.get_rng_state()
        torch.random.set_rng_state(self.state)
        if self.cuda_state is not None:
            self._cuda_outside = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(self.cuda_state, self._device)

    def __exit__(self, *_: object) -> None:
        self.state = torch.random.get_rng_state()
        torch.random.set_rng_state(self._outside)
        if self._cuda_outside is not None:
            self.cuda_state = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(self._cuda_outside, self._device)


def _shuffle(number: int, key: int) -> int:
    """Map 31 bits to 31 bits, one to one: xor with a shifted self and odd factors can both be undone."""
    number = (number + key) & _MASK
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x1B873593)):
        number ^= number >> shift
        number = (number * factor) & _MASK
    return number ^ (number >> 16)
