"""Utilization and memory of NVIDIA devices, from their driver's library; nothing without devices. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: str
    utilization: float
    """Share of the last sample period in which a kernel ran, 0 to 1."""
    used_bytes: int


def read_gpus() -> Iterator[Gpu]:
    """Every device that this process can see."""
    library, handles = _driver()
    for index, handle in enumerate(handles):
        try:
            rates, memory = library.nvmlDeviceGetUtilizationRates(handle), library.nvmlDeviceGetMemoryInfo(handle)
        except library.NVMLError:
            continue  # a device that is partitioned does not tell
        yield Gpu(index=str(index), utilization=rates.gpu / 100, used_bytes=int(memory.used))


@cache
def _driver() -> tuple[Any, tuple[Any, ...]]:
    """The driver's library and its devices; none without a driver, or without the library."""
    try:
        import pynvml
    except ImportError:
        return None, ()
    try:
        pynvml.nvmlInit()
        return pynvml, tuple(pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return pynvml, ()
