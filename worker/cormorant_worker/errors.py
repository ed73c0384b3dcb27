"""Exceptions of the worker, by cause. A message says what happened, the values, and what to do."""

from cormorant_contract.errors import BatchTimeout as BatchTimeout
from cormorant_contract.errors import ControlTimeout as ControlTimeout
from cormorant_contract.errors import CormorantError as CormorantError
from cormorant_contract.errors import FleetClosed as FleetClosed
from cormorant_contract.errors import FleetError as FleetError
from cormorant_contract.errors import MalformedWeights as MalformedWeights
from cormorant_contract.errors import NonfiniteWeights as NonfiniteWeights
from cormorant_contract.errors import StaleWeights as StaleWeights
from cormorant_contract.errors import StateError as StateError
from cormorant_contract.errors import UpdateFailed as UpdateFailed
from cormorant_contract.errors import WeightsError as WeightsError
from cormorant_contract.errors import WeightsMismatch as WeightsMismatch


class ManifestError(CormorantError, ValueError):
    """The manifest is valid but cannot run here (exit code 2)."""


class DeviceUnavailable(ManifestError):
    """The manifest asks for a device that this machine does not have."""


class EnvError(CormorantError):
    """An environment cannot be built or stepped. The traceback of its process is a note of the error."""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        if details:
            self.add_note(details.rstrip())


class UnknownEnv(EnvError, ValueError):
    """No environment of that name can be built here."""


class EnvBuildError(EnvError):
    """The environment's constructor or its first reset failed."""


class EnvCrashed(EnvError):
    """A running environment raised, hung or died."""

    def __init__(self, message: str, *, row: int = -1, has_stepped: bool = True, details: str = "") -> None:
        super().__init__(message, details=details)
        self.row: int = row
        """Number of the environment in its vector; -1: not known."""
        self.has_stepped: bool = has_stepped
        """False: no environment of the vector has completed a step yet, so a restart would fail again."""


class EnvRaised(EnvCrashed):
    """A running environment raised, and its exception goes to the user: nothing is restarted."""


class InvalidAction(EnvError, ValueError):
    """An action that must not reach the environment."""


class PolicyError(CormorantError):
    """A policy cannot be loaded or run."""


class PolicyLoadError(PolicyError):
    """The policy's factory is missing, raised, or returned something that is not a policy."""


class PolicyMismatch(PolicyError, ValueError):
    """The policy's output does not fit the environment's action space."""


class EnvNotSaved(StateError):
    """The environments cannot be saved; the message names them and what they lack."""


class DatasetError(CormorantError):
    """A dataset cannot be written or read."""


class DatasetMismatch(DatasetError):
    """The dataset at the URI has another environment or schema."""


class PartExists(DatasetError):
    """Another process has begun this part; each attempt writes its own part."""


class DatasetCorrupt(DatasetError):
    """A shard is missing, cut short, or differs from its digest."""


class EvaluationError(CormorantError):
    """An evaluation cannot store its results, or they are not exact."""


class WorkerFailed(FleetError):
    """A worker could not be started, or was restarted too often."""

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind: str = kind
        """The class of the worker's own error, e.g. "EnvBuildError"; empty when the process died without a word."""


class NoSuchWorker(FleetError):
    """The fleet has no worker of that name."""


class LastWorker(FleetError):
    """A fleet needs at least one worker."""


class FleetInterrupted(FleetError):
    """The fleet was told to stop while it waited for its first workers."""
