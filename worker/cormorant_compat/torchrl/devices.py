"""Torch devices that users name, checked before anything starts."""

from collections.abc import Sequence
from typing import Any

import torch


def check_device(given: Any, name: str, *, is_remote: bool = False) -> str:
    """A device as torch writes it, "" if none was given.

    Args:
        given: what `torch.device` takes, or None.
        name: of the argument, for messages.
        is_remote: the device belongs to another machine, so its existence cannot be checked.
    """
    if given is None:
        return ""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} {given!r} is not a torch device: {str(error).splitlines()[0]}") from error
    if is_remote:
        return str(device)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"{name} {device} does not exist: torch finds {count} CUDA devices; use another, or cpu")
        return str(device)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ValueError(
            f"{name} {device} cannot be used here: {str(error).partition('. ')[0].rstrip('.')}; use another, or cpu"
        ) from error
    return str(device)


def devices_of(given: Any, name: str, num_collectors: int, *, is_remote: bool) -> tuple[str, ...]:
    """One device for each collector, "" if none was given."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        several = [check_device(one, name, is_remote=is_remote) for one in given]
        if len(several) == 1:
            return (several[0],) * num_collectors
        if len(several) != num_collectors:
            raise ValueError(f"{name} has {len(several)} devices for {num_collectors} collectors; give as many, or one")
        return tuple(several)
    return (check_device(given, name, is_remote=is_remote),) * num_collectors


def storing_devices(storing: Any, general: Any, num_collectors: int) -> tuple[str, ...]:
    """Where each collector's batches are handed out: `storing_device`, else `device`, else the CPU, of this process."""
    stored = devices_of(storing, "storing_device", num_collectors, is_remote=False)
    usual = devices_of(general, "device", num_collectors, is_remote=True)
    return tuple(
        one or check_device(other or "cpu", "storing_device (left out, so that of device)")
        for one, other in zip(stored, usual, strict=True)
    )
