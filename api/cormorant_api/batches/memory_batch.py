"""The location of a batch in shared memory, for consumers that map it instead of downloading it."""

import fcntl
import os
from collections.abc import Callable, Sequence

import numpy as np

from cormorant_api.batches.ledger import Lent
from cormorant_contract.rest.batches import MemoryBatch, MemoryPart, MemoryTensor
from cormorant_contract.tensor_file import parse_header
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.shared_memory import SharedMemory


def memories_of(loan: Loan) -> list[SharedMemory]:
    """The shared memory of each part; empty if another process of this machine could not map one of them."""
    found = [part.memory for part in loan.parts if part.memory is not None]
    return found if len(found) == len(loan.parts) else []


def describe_memory(
    lent: Lent, file: Sequence[memoryview], memories: Sequence[SharedMemory], *, ack_within_s: float
) -> MemoryBatch:
    """Locate every tensor of a batch's file in the memory of its part, whose number begins the tensor's name."""
    parsed = parse_header(file[0], file_size=sum(map(len, file)))
    bases = [_address(memory.buffer) for memory in memories]
    tensors: list[dict[str, MemoryTensor]] = [{} for _ in memories]
    for (name, entry), data in zip(parsed.tensors.items(), file[1:], strict=True):
        part = int(name.partition("/")[0])
        offset = _address(data) - bases[part]
        tensors[part][name] = MemoryTensor(dtype=entry.dtype, shape=entry.shape, offset=offset)
    return MemoryBatch(
        id=lent.id,
        frames=lent.loan.num_frames,
        min_version=lent.loan.min_version,
        max_version=lent.loan.max_version,
        delivery=lent.delivery,
        ack_within_s=ack_within_s,
        lent_at=lent.lent_at,
        metadata=dict(parsed.metadata),
        parts=tuple(
            MemoryPart(path=f"/proc/{os.getpid()}/fd/{memory.descriptor}", size_bytes=memory.size_bytes, tensors=found)
            for memory, found in zip(memories, tensors, strict=True)
        ),
    )


def reading_of(memories: Sequence[SharedMemory]) -> Callable[[], bool]:
    """A predicate for whether a consumer maps one of them: consumers hold a shared lock on each part."""
    return lambda: any(_is_locked(memory.descriptor) for memory in memories)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError):  # its memory was closed with the fleet
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
