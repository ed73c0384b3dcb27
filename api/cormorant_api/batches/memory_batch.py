"""The location of a batch in shared memory, for consumers that map it instead of downloading it."""

import fcntl
import os
from collections.abc import Callable

import numpy as np

from cormorant_api.batches.ledger import Lent
from cormorant_contract.rest.batches import MemoryBatch, MemoryPart, MemoryTensor
from cormorant_contract.tensor_file import TensorEntry, parse_header
from cormorant_worker.fleet.batch_file import BatchFile
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.shared_memory import SharedMemory

_ALIGNMENT = 64


def describe_memory(lent: Lent, batch: BatchFile, *, ack_within_s: float) -> tuple[MemoryBatch, SharedMemory | None]:
    """Locate every tensor of a batch in shared memory.

    Returns:
        The description for the consumer, and extra memory for tensors that are in no part's shared memory (all of
        them if a part is on another machine), to be kept until the batch is settled.
    """
    parsed = parse_header(batch.header, file_size=batch.size_bytes)
    homes = [part.memory for part in lent.loan.parts if part.memory is not None]
    bases = [_address(home.buffer) for home in homes]
    tensors: list[dict[str, MemoryTensor]] = [{} for _ in homes]
    homeless: list[tuple[str, TensorEntry, memoryview]] = []
    for (name, entry), data in zip(parsed.tensors.items(), batch.buffers, strict=True):
        at = _address(data)
        for home, base, found in zip(homes, bases, tensors, strict=True):
            if base <= at and at + len(data) <= base + home.size_bytes:
                found[name] = MemoryTensor(dtype=entry.dtype, shape=entry.shape, offset=at - base)
                break
        else:
            homeless.append((name, entry, data))
    extra = None
    if homeless:
        extra = SharedMemory.create(sum(_padded(data) for _, _, data in homeless))
        homes.append(extra)
        tensors.append({})
        offset = 0
        for name, entry, data in homeless:
            extra.buffer[offset : offset + len(data)] = data
            tensors[-1][name] = MemoryTensor(dtype=entry.dtype, shape=entry.shape, offset=offset)
            offset += _padded(data)
    parts = [
        MemoryPart(path=f"/proc/{os.getpid()}/fd/{home.descriptor}", size_bytes=home.size_bytes, tensors=found)
        for home, found in zip(homes, tensors, strict=True)
    ]
    described = MemoryBatch(
        id=lent.id,
        frames=lent.loan.num_frames,
        min_version=lent.loan.min_version,
        max_version=lent.loan.max_version,
        delivery=lent.delivery,
        ack_within_s=ack_within_s,
        lent_at=lent.lent_at,
        metadata=dict(parsed.metadata),
        parts=tuple(parts),
    )
    return described, extra


def reading_of(loan: Loan) -> Callable[[], bool]:
    """A predicate for whether a consumer maps a loan's memory: consumers hold a shared lock on each part."""
    homes = [part.memory for part in loan.parts if part.memory is not None]
    return lambda: any(_is_locked(home.descriptor) for home in homes)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError):  # its memory was closed with the fleet
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _padded(data: memoryview) -> int:
    return -(-len(data) // _ALIGNMENT) * _ALIGNMENT


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
