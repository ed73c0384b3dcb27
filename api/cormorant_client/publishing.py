"""Publishing weights to a head: the safetensors body, the state of the update, and fetched weights.

A body is a header and views of the tensors' own memory: nothing is joined or copied, unless the caller may change its
tensors before they are sent.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from cormorant_client.delivery import NAME_BY_NUMPY, Array, view
from cormorant_client.errors import NotFound, UpdateFailed, WeightsError
from cormorant_client.head import HeadConnection, quoted
from cormorant_client.transport import Bytes
from cormorant_contract.fleet import Receipt
from cormorant_contract.rest import updates as rest
from cormorant_contract.tensor_file import TORCH_NAMES, make_header
from cormorant_contract.weights import Publishable, file_of, read_header, tensors_by_name

if TYPE_CHECKING:
    import torch

MAIN_MODEL = "policy"

_LONGEST_POLL_S = 20.0

_NAME_BY_TORCH = {f"torch.{attribute}": name for name, attribute in TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A safetensors file in pieces."""

    model: str
    """The model of all tensors; empty if names begin with it (`actor/layer.weight`)."""
    pieces: tuple[Bytes, ...]

    def copied(self) -> "Body":
        """A copy, after which the tensors may change."""
        return Body(model=self.model, pieces=(b"".join(self.pieces),))


def make_body(weights: Publishable, *, model: str = MAIN_MODEL, metadata: Mapping[str, str] | None = None) -> Body:
    """Build one safetensors file from weights, without copying tensors that are contiguous on the CPU.

    Args:
        weights: see `Publishable`.
        model: name of the model, unless `weights` is a mapping of model names.
        metadata: strings for the file's `__metadata__`.

    Raises:
        WeightsError: something in it is not a tensor, the file is not a safetensors file, or metadata is given for a
            file, which has its own.
    """
    data = file_of(weights)
    if metadata and data is not None:
        raise WeightsError("metadata cannot be added to a safetensors file; save the file with its metadata")
    if data is not None:
        return Body(model=model, pieces=(data,))
    flat, has_models = tensors_by_name(weights)
    found = [(name, *_bytes_of(name, value)) for name, value in flat.items()]
    # Widest elements first, so that each tensor is aligned for its dtype.
    found.sort(key=lambda entry: -(len(entry[3]) // max(1, prod(entry[2]))))
    header, _ = make_header(((name, dtype, shape) for name, dtype, shape, _ in found), metadata)
    return Body(model="" if has_models else model, pieces=(header, *(piece for *_, piece in found if len(piece))))


class Update(Receipt):
    """Properties reflect the head's last answer; `wait` and `refresh` ask again."""

    def __init__(self, head: HeadConnection, answer: rest.Update) -> None:
        self._head = head
        self.answer = answer
        """The head's last answer."""

    @property
    def version(self) -> int:
        return self.answer.version

    @property
    def state(self) -> rest.UpdateState:
        """State at the last answer: staged -> applying -> applied | partially_applied | failed | superseded."""
        return self.answer.state

    @property
    def warning(self) -> str:
        """A problem that did not stop the publish, such as a full disk; empty if there was none."""
        return self.answer.warning

    @property
    def digest(self) -> str:
        """`xxh3:...` of the bytes that the head received."""
        return self.answer.digest

    @property
    def receipts(self) -> tuple[rest.UpdateReceipt, ...]:
        """Each worker's receipt."""
        return self.answer.receipts

    @property
    def applied(self) -> tuple[str, ...]:
        return tuple(receipt.worker for receipt in self.receipts if receipt.state == "applied")

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(receipt.worker for receipt in self.receipts if receipt.state == "waiting")

    @property
    def refused(self) -> dict[str, str]:
        return {receipt.worker: receipt.error for receipt in self.receipts if receipt.state == "refused"}

    def refresh(self, *, wait_s: float = 0.0) -> "Update":
        """Ask for the current state; the head answers at once, or when the update ends within `wait_s`."""
        path = f"/v1/updates/{quoted(self.answer.update_id)}"
        self.answer = self._head.get(rest.Update, path, params={"wait": wait_s or None}, wait_s=wait_s)
        return self

    def wait(self, timeout: float = 30.0) -> "Update":
        """See `Receipt.wait`.

        Raises:
            UpdateFailed: workers refused the weights, or do not use them in time; the message names those workers.
            HeadUnreachable: the head was unreachable for longer than `reconnect_s`. Publishing
                these weights again under the same version is safe.
        """
        until = time.monotonic() + timeout
        while self.answer.state not in rest.FINAL_STATES and not self.refused:
            left = until - time.monotonic()
            if left <= 0:
                raise UpdateFailed(
                    f"version {self.version} is {self.state} after {timeout:g} s: {self.answer.workers.acked} of "
                    f"{self.answer.workers.total} workers act with it{_named(self.waiting)}; "
                    "wait longer, or look at /v1/workers"
                )
            try:
                Update.refresh(self, wait_s=min(left, _LONGEST_POLL_S))  # an AsyncUpdate's is a coroutine
            except NotFound as error:
                raise UpdateFailed(
                    f"the head was replaced and does not know version {self.version}; publish the weights again"
                ) from error
        if self.answer.state == "failed" or self.refused:
            refused = [f"{worker}: {error}" for worker, error in self.refused.items()]
            raise UpdateFailed(
                f"version {self.version} failed: {self.answer.error or 'not every worker took it'}{_named(refused)}"
            )
        if self.answer.superseded_by is not None:  # workers may not use the newer one yet
            answer = self._head.get(rest.Update, f"/v1/updates/u{self.answer.superseded_by}")
            Update(self._head, answer).wait(max(0.0, until - time.monotonic()))
        return self


class PulledWeights:
    """Weights fetched from the head. Tensors are views of the received bytes."""

    def __init__(self, model: str, version: int, data: memoryview) -> None:
        """Raises WeightsError if the bytes are not a safetensors file."""
        self.model, self.version = model, version
        self.data = data
        """The safetensors file."""
        self._file = read_header(data, " from the head")

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata published with these weights."""
        return self._file.metadata

    def numpy(self) -> dict[str, Array]:
        """Arrays by name.

        Raises:
            WeightsError: numpy has no such dtype (bfloat16): use `state_dict`.
        """
        try:
            return {self._plain(name): view(self.data, self._file, entry) for name, entry in self._file.tensors.items()}
        except KeyError as error:
            raise WeightsError(f"numpy has no dtype for {error}; use state_dict(), which needs torch") from error

    def state_dict(self) -> "dict[str, torch.Tensor]":
        """Torch tensors by name, for `module.load_state_dict`."""
        import torch

        state: dict[str, torch.Tensor] = {}
        for name, entry in self._file.tensors.items():
            dtype = getattr(torch, TORCH_NAMES[entry.dtype])
            if entry.begin == entry.end:
                state[self._plain(name)] = torch.empty(entry.shape, dtype=dtype)
                continue
            start = self._file.data_start + entry.begin
            piece = torch.frombuffer(self.data, dtype=torch.uint8, count=entry.end - entry.begin, offset=start)
            if start % dtype.itemsize:
                piece = piece.clone()
            state[self._plain(name)] = piece.view(dtype).reshape(entry.shape)
        return state

    def _plain(self, name: str) -> str:
        return name.removeprefix(f"{self.model}/")


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else ""


def _bytes_of(name: str, value: Any) -> tuple[str, tuple[int, ...], memoryview]:
    if isinstance(value, np.ndarray):
        if value.dtype not in NAME_BY_NUMPY:
            raise WeightsError(f'tensor "{name}" has dtype {value.dtype}, which safetensors does not support')
        return NAME_BY_NUMPY[value.dtype], value.shape, _memory(np.ascontiguousarray(value))
    dtype = _NAME_BY_TORCH.get(str(getattr(value, "dtype", "")))
    if dtype is None or not hasattr(value, "detach"):
        raise WeightsError(
            f'"{name}" is of type {type(value).__name__}, not a tensor that safetensors can hold; remove it from the '
            "state dict"
        )
    import torch

    plain = value.detach().cpu().contiguous()
    return dtype, tuple(value.shape), _memory(plain.reshape(-1).view(torch.uint8).numpy())


def _memory(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy arrays are buffers
