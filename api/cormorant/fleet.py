"""What a learner needs of a fleet, wherever it runs: a script that keeps to these words moves from a laptop to a
cluster by one line.

    with cormorant.open_fleet("job.yaml") as fleet:         # workers of this process
    with cormorant.connect("pong", namespace="rl") as fleet:  # a job of the cluster
        train(fleet)
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from cormorant_contract.stats import Stats

if TYPE_CHECKING:
    from gymnasium import Space
    from tensordict import TensorDict

__all__ = ["Batches", "Fleet", "Receipt", "Stats"]


class Batches(Protocol):
    """An iterator of batches, and a context manager: what it lent goes back at the end of a `with` block."""

    num_frames: int
    """Handed out so far."""

    def __iter__(self) -> "Iterator[TensorDict]": ...

    def __next__(self) -> "TensorDict": ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None: ...


class Receipt(Protocol):
    """What became of published weights."""

    @property
    def version(self) -> int:
        """The number of these weights: `("collector", "policy_version")` of the frames that they act in."""

    @property
    def applied(self) -> tuple[str, ...]:
        """Workers that act with this version or a newer one."""

    @property
    def waiting(self) -> tuple[str, ...]:
        """Workers that have it staged for their next batch."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Why workers refused it, by name."""

    def wait(self, timeout: float = 30.0) -> Self:
        """Wait until every worker acts with this version or a newer one.

        Raises:
            UpdateFailed: workers refused it, or not all act with it within `timeout` seconds.
        """


@runtime_checkable
class Fleet(Protocol):
    """Workers that collect. `open_fleet` and `connect` return one each; both have more than this."""

    @property
    def spaces(self) -> "tuple[Space[Any], Space[Any]]":
        """Observation and action space of one environment."""

    @property
    def version(self) -> int:
        """The newest published policy version; 0: the initial weights act."""

    @property
    def statistics(self) -> "Mapping[int, Mapping[str, Any]] | None":
        """What each version acted with, for `cormorant.postproc.normalized`."""

    def batches(self, *, copy: bool = False) -> Batches:
        """Batches to the end of the job: TensorDicts `[B, T]`, in sync mode `[W*B, T]`, with TorchRL's keys. Each is
        valid until the next one is asked for; with `copy`, for good. Asking for the next one acknowledges it.
        """

    def next_batch(self, timeout: float | None = None, *, copy: bool = False) -> "TensorDict | None":
        """The next batch; None at the end.

        Raises:
            TimeoutError: none came within `timeout` seconds.
        """

    def publish(self, weights: Any, *, version: int | None = None, wait: float = 0.0) -> Receipt:
        """Hand weights to every worker, which takes them at its next batch boundary.

        Args:
            weights: a torch module, its state dict, or a mapping of model names to either.
            version: higher than any before; None: the next number.
            wait: seconds to wait for every worker to act with them.
        """

    def pause(self) -> AbstractContextManager[object]:
        """Stop stepping until `resume`, or to the end of a `with` block. A remote pause outside of `with` ends by
        itself after a minute.
        """

    def resume(self) -> object:
        """Go on after `pause`."""

    def state(self) -> bytes | memoryview:
        """Environments, generators, weights and the count of frames, at a batch boundary."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state()` to a file."""

    def restore(self, state: bytes | memoryview | str | os.PathLike[str]) -> None:
        """Go on from what `state` returned or `save` wrote, of the same job."""

    def seed(self, seed: int) -> tuple[str, ...]:
        """New environments and generators in every worker, at its next batch boundary. Returns the workers' names."""

    def stats(self) -> Stats:
        """How the fleet is doing."""

    def close(self) -> None:
        """End the workers of `open_fleet`; leave those of `connect` running."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
