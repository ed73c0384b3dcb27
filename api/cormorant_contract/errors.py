"""The root of all deliberate exceptions, the errors of every fleet, and what the contract refuses.

CormorantError
  FleetError           the fleet cannot do what was asked
    FleetClosed        it was closed by this process
    ControlTimeout     workers did not do it in time
  BatchTimeout         no batch arrived in the given time
  UpdateFailed         published weights did not reach the workers
  StateError           a saved state cannot be written, read or restored
  WeightsError         not weights
    MalformedWeights   the bytes are not safetensors
    WeightsMismatch    missing, extra or misshapen tensors; nothing was applied
    NonfiniteWeights   NaN or infinite values, which were not allowed
    StaleWeights       a version that is not newer than the published one
ManifestError          a manifest, or one document of it, is not a CollectorJob; carries every problem found
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches


class CormorantError(RuntimeError):
    """Root of the errors that a user can do something about: shown as one sentence, without a traceback.

    A RuntimeError, and also a ValueError if an argument is refused, because scripts for TorchRL and Tianshou catch
    those.
    """


class FleetError(CormorantError):
    """The fleet cannot do what was asked."""


class FleetClosed(FleetError):
    """The fleet, or the client of one that runs elsewhere, is closed."""


class ControlTimeout(FleetError, TimeoutError):
    """Workers did not respond in time. The message names them or their progress, and the limit."""


class BatchTimeout(CormorantError, TimeoutError):
    """No batch arrived in the given time."""


class UpdateFailed(CormorantError):
    """Published weights did not reach the workers: all refused them, or not all act with them in time."""


class StateError(CormorantError):
    """A state cannot be written or read, or this fleet cannot restore it."""


class WeightsError(CormorantError):
    pass


class MalformedWeights(WeightsError):
    """The bytes are not safetensors."""

    def __init__(self, message: str, *, offset: int = 0) -> None:
        super().__init__(message)
        self.offset: int = offset
        """Position of the fault in the bytes."""


class WeightsMismatch(WeightsError):
    """The tensors differ from the policy's in name, shape or dtype. Nothing was applied."""

    def __init__(self, message: str, *, differences: Mapping[str, Sequence[str]] | None = None) -> None:
        """`differences`: names of tensors by kind: missing, unexpected, shape, dtype."""
        super().__init__(message)
        self.differences = differences or {}


class NonfiniteWeights(WeightsError):
    """Some values are NaN or infinite. Nothing was applied."""


class StaleWeights(WeightsError):
    """The version is not newer than what is already published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem in a manifest: its place, the value, what is wrong with it, and what to do."""

    message: str
    """The sentence, without the place: `0 is less than 1; write a number from 1 to 65536`."""

    source: str = ""
    """File name as the user wrote it; empty when the document did not come from a file."""

    document: int = 0
    """Position among the documents of the source, from 1; 0 when the problem is of the whole source."""

    name: str = ""
    """metadata.name of the document, if it has one."""

    location: tuple[str | int, ...] = ()
    """Keys and list positions from the document's root to the field."""

    line: int = 0
    """Line of the source, from 1; 0 when unknown."""

    @property
    def path(self) -> str:
        """The field as people write it: `spec.workerGroups[1].name`."""
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.location)
        return path.removeprefix(".")

    def __str__(self) -> str:
        source = f"{self.source}:{self.line}" if self.source and self.line else self.source
        document = f"document {self.document}" if self.document else ""
        if document and self.name:
            document += f" ({self.name})"
        return ": ".join(part for part in (source, document, self.path, self.message) if part)


class ManifestError(Exception):
    """A manifest is refused; `problems` lists everything found, in the order of the documents."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def missing_library(error: ModuleNotFoundError, extra: str, *, what: str) -> str:
    """Message that says what to install."""
    return f"{what} needs {error.name}, which is not installed: pip install 'cormorant[{extra}]'"


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Within the block, a failed import of a library raises an ImportError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("cormorant"):
            raise
        raise ImportError(missing_library(error, extra, what="this part of cormorant"), name=error.name) from None


def did_you_mean(name: str, known: Iterable[str], *, most: int = 3, otherwise: str = "", cutoff: float = 0.6) -> str:
    """End of a sentence about an unknown name; `otherwise` if no known name resembles it, ignoring case."""
    folded = {candidate.lower(): candidate for candidate in known}
    matches = [folded[match] for match in get_close_matches(name.lower(), folded, n=most, cutoff=cutoff)]
    return f"; did you mean {' or '.join(matches)}?" if matches else otherwise
