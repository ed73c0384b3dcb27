"""The protocol of a fleet, wherever it runs: a script that uses only this moves from a laptop to a cluster by changing
one line.

    with cormorant.open_fleet("job.yaml") as fleet:         # workers of this process
    with cormorant.connect("pong", namespace="rl") as fleet:  # a job of the cluster
        train(fleet)

Behavior that both share is documented here, the rest in `LocalFleet` and `Client`.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from cormorant_contract.disk import write_durably
from cormorant_contract.errors import StateError
from cormorant_contract.weights import Publishable

if TYPE_CHECKING:
    from gymnasium import Space
    from tensordict import TensorDict

State = bytes | memoryview | str | os.PathLike[str]
"""A result of `state`, or the path of a file that `save` wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of a fleet at one moment."""

    frames: int
    """Frames accepted by the output: what `totalFrames` counts."""
    total_frames: int | None
    """Frames to collect in all; None: no limit."""
    stepped_frames: int
    """Frames stepped so far, including those of unfinished batches. Two readings give a rate."""
    dropped: Mapping[str, int]
    """Frames that were stepped and never delivered, by reason: crash, stale, drop_oldest, drain, restore, seed."""
    episodes: int
    """Episodes that ended so far."""
    mean_return: float | None
    """Mean return of the last 100 episodes; None: none has ended."""
    mean_length: float | None
    metric_means: Mapping[str, float | None]
    """Means of `collection.episodeMetrics` over the same episodes, by name; None: no episode had a number."""
    version: int
    """The newest published policy version."""
    ready_workers: int
    desired_workers: int
    restarts: int
    """Workers that were replaced so far."""
    queued_batches: int
    """Complete batches that no consumer has taken yet."""
    is_paused: bool


class Batches(Protocol):
    """An iterator of batches, and a context manager: at the end of a `with` block the last batch is returned. Use it
    in one thread; several threads share batches with `streaming_split`.
    """

    num_frames: int
    """Frames handed out so far."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> "TensorDict": ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Return the last batch. May be called twice, and from any thread."""


class Shard(Protocol):
    """One learner's part of the batches."""

    def iter_batches(self, *, copy: bool = False) -> Batches:
        """Iterate over this part as `Fleet.batches` does over all."""


class Receipt(Protocol):
    """State of a publish: the workers that use the weights, and those that refused them."""

    @property
    def version(self) -> int:
        """Version of these weights: `("collector", "policy_version")` of the frames that they collect."""

    @property
    def applied(self) -> tuple[str, ...]:
        """Workers that use this version or a newer one; none when the job has ended."""

    @property
    def waiting(self) -> tuple[str, ...]:
        """Workers that will apply this version at their next batch."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Reasons of the workers that refused these weights, by worker."""

    def wait(self, timeout: float = 30.0) -> Self:
        """Wait until every worker uses this version or a newer one; an ended job has none to wait for.

        Raises:
            UpdateFailed: workers refused it, or not all use it within `timeout` seconds; names them.
        """


@runtime_checkable
class Fleet(Protocol):
    """Workers that collect. `open_fleet` and `connect` return one, with additional methods. Methods may be
    called from any thread. Close it, or use it as a context manager.
    """

    @property
    def spaces(self) -> "tuple[Space[Any], Space[Any]]":
        """Observation and action space of one environment."""

    @property
    def version(self) -> int:
        """The newest published policy version; 0: workers use the initial weights."""

    @property
    def statistics(self) -> "Mapping[int, Mapping[str, Any]] | None":
        """Normalization statistics by policy version, for `cormorant.postproc.normalized`; empty or None without
        `normalize`.
        """

    def batches(self, *, copy: bool = False) -> Batches:
        """Iterate over batches until `total_frames` are delivered; without that number, indefinitely.

            for batch in fleet.batches():
                learn(batch)

        Asking for the next batch acknowledges the last one.

        Args:
            copy: by default the tensors may be views of shared memory, valid until the next batch is asked for; True
                makes them yours.

        Yields:
            TensorDict `[B, T]` in async mode, `[W*B, T]` in sync mode: TorchRL's keys; docs/reference/batches.md.
        """

    def next_batch(self, timeout: float | None = None, *, copy: bool = False) -> "TensorDict | None":
        """The next batch, as `batches` yields it; None when all have been delivered.

            while (batch := fleet.next_batch(timeout=60)) is not None:
                learn(batch)

        Args:
            timeout: seconds; None waits as long as workers make progress and the head answers.
            copy: as in `batches`.

        Raises:
            BatchTimeout: no batch arrived in time (a TimeoutError); you may call again.
            FleetClosed: the fleet, or this client, is closed.
        """

    def streaming_split(self, n: int) -> Sequence[Shard]:
        """Split the batches among n data-parallel learners: each batch goes to exactly one of them. They may get
        different numbers of batches.

            for batch in fleet.streaming_split(n)[rank].iter_batches():
                learn(batch)
        """

    def publish(self, weights: Publishable, *, version: int | None = None, wait: float = 0.0) -> Receipt:
        """Hand weights to every worker, which takes them at its next batch boundary: all of them or none.

        Args:
            weights: a torch module, its state dict, a mapping of model names to either, or a safetensors file (bytes or
                path).
            version: higher than any before; None: the next number.
            wait: seconds to wait for every worker to use them.

        Raises:
            WeightsMismatch, NonfiniteWeights: the tensors do not fit the policy, or are not finite.
            StaleWeights: the version is not higher than the published one.
            WeightsError: `weights` has no tensors, or its file cannot be read.
            UpdateFailed: with `wait`, no worker used them in time.
        """

    def pause(self) -> AbstractContextManager[object]:
        """Stop every worker at its next vector step until `resume`, or until the end of a `with` block. Partial batches
        are kept. A remote pause outside of `with` expires after a minute.

            with fleet.pause():
                evaluate()

        Raises:
            ControlTimeout: a worker did not stop in time; the others stay paused.
        """

    def resume(self) -> object:
        """Continue after `pause`. Has no effect on a running fleet."""

    def state(self) -> bytes | memoryview:
        """Environments, generators, weights and the frame count, at a batch boundary. Batches that are not taken yet
        are counted but not saved: pause before the call, and take them after it.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state()` to a file atomically. `restore` and `open_fleet(..., resume=path)` continue from it.

        Raises:
            StateError: the file cannot be written.
        """
        state = self.state()
        try:
            write_durably(Path(path), state)
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StateError(f"cannot write the state to {path}: {reason}") from error

    def restore(self, state: State) -> None:
        """Continue from a result of `state` or a file of `save`, of the same job with the same number of workers.

        Batches that were not taken are dropped. With a dataset, the frame count stays that of the dataset.

        Raises:
            StateError: the file cannot be read, or the state is of another job or number of workers.
        """

    def seed(self, seed: int) -> tuple[str, ...]:
        """Reseed every worker at a batch boundary: environments and random streams become those of a new fleet with
        this seed. Weights, versions and the frame count stay; open trajectories end. Returns the workers' names.
        """

    def stats(self) -> Stats:
        """Counters of the fleet; costs the same for any number of workers."""

    def close(self) -> None:
        """End the workers of `open_fleet`; leave those of `connect` running. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def read_state(state: State) -> bytes | memoryview:
    """The bytes of a state.

    Raises:
        StateError: the file cannot be read, or this is neither bytes nor a path.
    """
    if isinstance(state, bytes | bytearray | memoryview):
        return state
    if not isinstance(state, str | os.PathLike):
        raise StateError(f"a {type(state).__name__} is not a state; pass what state() returned, or the path of a file")
    try:
        return Path(state).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StateError(f"cannot read the state in {state}: {reason}") from error
