"""A batch as the head delivers it: safetensors bytes, or the workers' own memory, as arrays `[B, T]`.

Keys, dtypes and shapes are those of TorchRL: see `Delivery.numpy`.

Memory on this machine is opened by path and mapped, never sent. A mapping holds a shared lock on its memory (flock),
and the head does not reuse the memory while a lock is held. The lock belongs to the open file: it ends with the batch,
with its last array, or with the process, however that ends.

A path like /proc/17/fd/9 means something else on another machine, and in another container: memory is opened only when
the process in the path is the one that listens at the head's port here.

# B envs, T steps, K ends of trajectories; arrays are stored time-major
"""

import fcntl
import json
import mmap
import os
import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cormorant_client.errors import BadBatch, BatchGone
from cormorant_client.head import HeadConnection
from cormorant_contract.rest.batches import MemoryBatch
from cormorant_contract.tensor_file import NUMPY_NAMES, MalformedTensorFile, TensorEntry, TensorFile, parse_header

if TYPE_CHECKING:
    from tensordict import TensorDict

Array = npt.NDArray[Any]

NUMPY_BY_NAME: Mapping[str, np.dtype[Any]] = {name: np.dtype(attribute) for name, attribute in NUMPY_NAMES.items()}
NAME_BY_NUMPY: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_BY_NAME.items()}

METADATA_KEY = "cormorant_batch"

_FLAGS = frozenset({"next/reward", "next/terminated", "next/truncated", "is_init"})
"""Values of a step, `[T, B]`, which learners get as `[B, T, 1]`."""
_FINAL = "final/"
_PATH = re.compile(r"^/proc/([0-9]+)/fd/[0-9]+$")
_LOCK_WITHIN_S = 1.0

Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a batch that one worker collected, as stored."""

    worker: str
    attempt: int
    num_envs: int
    num_steps: int
    num_frames: int
    arrays: Arrays
    """Arrays by name, without the part's number: `observation` [T+1, B, ...], `next/reward` [T, B], ..."""


class Delivery:
    """One delivered batch, with the number of its delivery. Read it with `numpy()` or `tensordict()`.

    A batch in the head's shared memory (`is_shared`) is valid until it is acknowledged, which an iterator does when the
    next batch is requested; `tensordict(copy=True)` keeps it.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        metadata: Mapping[str, Any],
        *,
        is_shared: bool = False,
        on_ack: Callable[["Delivery"], None] = lambda _: None,
        on_forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts = tuple(parts)
        self.id: str = str(metadata["id"])
        """Globally unique, for example `9f3a0c1d-17`: random digits of this start of the head, and a number."""
        self.num_frames = int(metadata["frames"])
        self.min_version: int = int(metadata["min_version"])
        """Oldest policy version in the batch; -1 if all actions were random."""
        self.max_version = int(metadata["max_version"])
        self.delivery: int = int(metadata["delivery"])
        """Number of this delivery: 1 for the first."""
        self.mode: str = str(metadata["mode"])
        """sync: `[W*B, T]`, one part of each worker; async: `[B, T]`."""
        self.post_processing: dict[str, Any] = dict(metadata.get("post_processing", {}))
        """Post-processing from the manifest (multiStep, splitTrajectories); only `tensordict()` applies it."""
        self.statistics: dict[int, Any] = {int(key): found for key, found in metadata.get("statistics", {}).items()}
        """Normalization statistics of each policy version in the batch, for `cormorant_postproc.normalized`; empty
        unless the manifest has `normalize`."""
        self.task_names: tuple[str, ...] = tuple(metadata.get("tasks", ()))
        """Names of the manifest's variants, in the order of their ids; empty without variants."""
        self.is_shared = is_shared
        self._on_ack = on_ack
        self._on_forget = on_forget
        self.is_acked: bool = False
        """True once the batch was returned to the head."""
        self._nested: dict[str, Any] | None = None

    def numpy(self) -> dict[str, Any]:
        """The frames as they were collected: nested dicts of arrays `[B, T, ...]`, views of the received bytes where
        possible.

        Returns:
            `observation` (nested for Dict spaces), `action`, the policy's outputs, recurrent states and `is_init`;
            `next`: observation, states, `reward` float32, `done`, `terminated`, `truncated` bool, each `[B, T, 1]`;
            `collector`: `traj_ids` and `policy_version` int64 `[B, T]`, with variants `task_id` int64 `[B, T]` (see
            `task_names`), and `mask` bool `[B, T]` where columns have
            different lengths. Where the mask is False every value is zero, except the observation right after a
            column's last frame: the next observation of that frame.

        Raises:
            BatchGone: the batch was in shared memory and has been acknowledged.
        """
        if self.is_acked and self.is_shared:
            raise BatchGone(
                f"batch {self.id} was returned to the head; call tensordict(copy=True) before taking the next batch"
            )
        if self._nested is None:
            self._nested = _assemble(self.parts)
        return self._nested

    def tensordict(self, *, copy: bool = False) -> "TensorDict":
        """The batch as a TensorDict `[B, T]` with the names `(None, "time")`; needs torch and tensordict.

        Applies `multiStep` and `splitTrajectories` of the manifest.

        Args:
            copy: return tensors that own their memory. Otherwise they are views of the arrays from `numpy()`.

        Raises:
            BatchGone: the batch was in shared memory and has been acknowledged.
        """
        import torch
        from tensordict import TensorDict

        def wrapped(values: Mapping[str, Any]) -> dict[str, Any]:
            return {
                key: wrapped(value) if isinstance(value, dict) else torch.from_numpy(value)
                for key, value in values.items()
            }

        nested = self.numpy()
        shape = nested["next"]["done"].shape[:2]
        batch = TensorDict(wrapped(nested), batch_size=list(shape), names=[None, "time"])
        if self.post_processing:
            from cormorant_postproc.steps import of_collection

            batch = of_collection(self.post_processing)(batch)
        return batch.clone() if copy else batch

    def ack(self) -> None:
        """Acknowledge the batch: the head will not deliver it again. Idempotent."""
        if not self.is_acked:
            self._on_forget()  # before the head checks for readers of its memory
            self._on_ack(self)
        self.forget()

    def forget(self) -> None:
        """Mark the batch as returned to the head: its memory must no longer be read."""
        self._on_forget()
        self.is_acked = True


def decode(data: memoryview, *, on_ack: Callable[[Delivery], None] = lambda _: None) -> Delivery:
    """Read a safetensors batch. Arrays are views of `data`, which must not change.

    Raises:
        BadBatch: the bytes are not a batch of this format.
    """
    if data.readonly:  # torch expects writable memory
        data = memoryview(bytearray(data))
    try:
        file = parse_header(data)
        arrays = {name: view(data, file, entry) for name, entry in file.tensors.items()}
    except MalformedTensorFile as error:
        raise BadBatch(f"the batch is not a safetensors file: {error}") from error
    except KeyError as error:
        raise BadBatch(f"the batch has a tensor of dtype {error}, which numpy does not support") from error
    return _make_batch(file.metadata, arrays, on_ack=on_ack)


def decode_memory(told: MemoryBatch, mappings: "Mappings", *, on_ack: Callable[[Delivery], None]) -> Delivery:
    """Map a batch in the head's memory. It is locked until it is acknowledged or forgotten.

    Raises:
        NotHere: a part cannot be mapped. Nothing stays locked then.
        BadBatch: the memory does not match the description. Nothing stays locked, although the exception lives on.
    """
    held = Held()
    try:
        arrays = {
            name: array_at(memory, tensor.dtype, tensor.shape, tensor.offset)
            for part in told.parts
            for memory in (mappings.open(part.path, part.size_bytes, held),)
            for name, tensor in part.tensors.items()
        }
        return _make_batch(told.metadata, arrays, is_shared=True, on_ack=on_ack, on_forget=held.release)
    except (KeyError, ValueError) as error:
        held.release()
        raise BadBatch(f"the head's memory no longer contains that batch: {error}") from error
    except (BadBatch, NotHere):
        held.release()
        raise


class NotHere(Exception):
    """This process cannot open the head's memory."""


class Held:
    """The memories of one batch: locked until `release`, or until this object and its arrays are garbage-collected."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        weakref.finalize(self, _close, self.descriptors)

    def release(self) -> None:
        """Let the head reuse the memory. May be called twice."""
        _close(self.descriptors, unlocks=True)


class Mappings:
    """Maps the head's memory. Each batch gets its own mappings, which end with its last array."""

    def __init__(self, head: HeadConnection) -> None:
        self._ports = {used.port for used in (head.address, head.bulk) if used is not None and used.is_loopback}
        self._heads: set[int] = set()
        """Pids verified to be the head."""

    def open(self, path: str, size_bytes: int, held: Held) -> memoryview:
        """Map one memory and lock it, so that the head does not write there.

        Args:
            held: gets the open file, which `held.release` closes.

        Raises:
            NotHere: the path does not exist, belongs to another process, or may not be opened.
        """
        match = _PATH.match(path)
        if match is None:
            raise NotHere
        pid = int(match[1])
        if pid not in self._heads:
            if not _listens(pid, self._ports):
                raise NotHere
            self._heads.add(pid)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            held.descriptors.append(descriptor)
            if os.fstat(descriptor).st_size >= size_bytes:
                _lock(descriptor)
                return memoryview(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:
            raise NotHere from error
        raise NotHere


def _lock(descriptor: int) -> None:
    # The head locks it for a moment to test for holders; wait for that.
    deadline = time.monotonic() + _LOCK_WITHIN_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
        else:
            return


def _close(descriptors: list[int], *, unlocks: bool = False) -> None:
    while descriptors:
        descriptor = descriptors.pop()
        if unlocks:  # arrays may live on, and their mapping has the same open file
            with suppress(OSError):  # it was not locked, either
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _listens(pid: int, ports: set[int]) -> bool:
    """True when a process of this machine listens at one of the ports."""
    import psutil

    with suppress(psutil.Error):  # another user's process, or it ended
        connections = psutil.Process(pid).net_connections("tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port in ports for one in connections)
    return False


def view(data: memoryview, file: TensorFile, entry: TensorEntry) -> Array:
    """View one tensor of a file as an array over the file's bytes."""
    return array_at(data, entry.dtype, entry.shape, file.data_start + entry.begin)


def array_at(data: memoryview, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
    """View bytes of a buffer as an array; a copy if they are not aligned.

    Raises:
        KeyError: numpy has no such dtype.
        ValueError: the buffer ends before the array does.
    """
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(data, NUMPY_BY_NAME[dtype], count=count, offset=offset).reshape(shape)
    return array if array.flags.aligned else array.copy()


def _make_batch(metadata: Mapping[str, str], arrays: Arrays, **options: Any) -> Delivery:
    try:
        document = json.loads(metadata[METADATA_KEY])
        parts = [_part(number, entry, arrays) for number, entry in enumerate(document["parts"])]
        if not parts or not any(part.num_steps for part in parts):
            raise BadBatch(f"batch {document['id']} has no steps")
        return Delivery(parts, document, **options)
    except (KeyError, TypeError, ValueError) as error:
        raise BadBatch(f"cannot read the batch's metadata: {type(error).__name__} {error}") from error


def _part(number: int, entry: Mapping[str, Any], arrays: Arrays) -> Part:
    prefix = f"{number}/"
    own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    num_steps, num_envs = int(entry["num_steps"]), int(entry["num_envs"])
    for name, array in own.items():
        wanted: tuple[int, ...] = (num_steps, num_envs)
        if name == "collector/lengths":
            wanted = (num_envs,)
        elif name.startswith((_FINAL, "ends/")):
            wanted = (int(entry["num_ends"]),)
        elif _is_carried(name, array, num_steps):
            wanted = (num_steps + 1, num_envs)
        if array.shape[: len(wanted)] != wanted:
            raise BadBatch(f'tensor "{prefix}{name}" has shape {array.shape}, but the metadata says {wanted}')
    return Part(
        worker=str(entry["worker"]),
        attempt=int(entry["attempt"]),
        num_envs=num_envs,
        num_steps=num_steps,
        num_frames=int(entry["frames"]),
        arrays=own,
    )


def _is_carried(name: str, array: Array, num_steps: int) -> bool:
    """Whether row t+1 of an array is the `next` of row t: observations and recurrent states."""
    return not name.startswith(("next/", "collector/")) and name != "is_init" and array.shape[:1] == (num_steps + 1,)


def _assemble(parts: Sequence[Part]) -> dict[str, Any]:
    longest = max(part.num_steps for part in parts)
    # A part without a step has no rows, but keeps its columns.
    model = max(parts, key=lambda part: part.num_steps)
    ends = list(accumulate((part.num_envs for part in parts), initial=0))
    columns = [slice(first, end) for first, end in pairwise(ends)]

    def rows_of(name: str, begin: int = 0, *, copy: bool = False) -> Array:
        """Rows from `begin` on, `[W*B, T, ...]`, zeros where a part has fewer. A view where there is one part."""
        like = model.arrays[name]
        if len(parts) == 1 and not copy:
            return like[begin : begin + longest].swapaxes(0, 1)
        whole_TB = np.empty((longest, ends[-1], *like.shape[2:]), like.dtype)
        for part, own in zip(parts, columns, strict=True):
            if part.num_steps:
                whole_TB[: part.num_steps, own] = part.arrays[name][begin : begin + part.num_steps]
            whole_TB[part.num_steps :, own] = 0
        return whole_TB.swapaxes(0, 1)

    def following(name: str) -> Array:
        """The row after each step, or the true last value where a trajectory ended."""
        found = rows_of(name, 1, copy="ends/time" in model.arrays)
        for part, own in zip(parts, columns, strict=True):
            if (times := part.arrays.get("ends/time")) is not None:
                found[own.start + part.arrays["ends/env"], times] = part.arrays[_FINAL + name]
        return found

    root: dict[str, Any] = {"next": {}, "collector": {}}
    lengths = np.concatenate([part.arrays["collector/lengths"] for part in parts])
    if (lengths < longest).any():
        root["collector"]["mask"] = np.arange(longest) < lengths[:, None]
    for name, array in model.arrays.items():
        if name == "collector/lengths" or name.startswith((_FINAL, "ends/")):
            continue
        key, found = tuple(name.split("/")), rows_of(name)
        _put(root, key, found[..., None] if name in _FLAGS else found)
        if _is_carried(name, array, model.num_steps):
            _put(root["next"], key, following(name))
    root["next"]["done"] = root["next"]["terminated"] | root["next"]["truncated"]
    return root


def _put(target: dict[str, Any], key: tuple[str, ...], value: Array) -> None:
    for part in key[:-1]:
        target = target.setdefault(part, {})
    target[key[-1]] = value
