"""Python objects of a script for one worker, which replace the manifest's entrypoints: callables, modules, settings.

They are cloudpickled to workers alongside the manifest, so functions of a main script and closures work, too.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from cormorant_worker.collect.block import Block
from cormorant_worker.errors import ManifestError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOverrides:
    """A script's objects for one worker. Unset fields follow the manifest."""

    envs: tuple[Callable[[], Any], ...] = ()
    """One callable per environment, which returns a gymnasium.Env; or a single one, which returns an object with
    `num_workers` environments and `vector_env(seeds) -> VectorEnv`, called once. Empty: the manifest's."""
    policy: Any = None
    """The policy itself: anything that a policy factory may return (see `policy.py`)."""
    policy_factory: Callable[..., Any] | None = None
    """Called in the worker to make the policy."""
    takes_spaces: bool = False
    """`policy_factory` is called with the observation space and the action space of one environment."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `CollectorConfig` that differ from the manifest's."""
    on_batch: Callable[[Block], None] | None = None
    """Called in the worker with each batch before it is handed over, for example to put it into a replay buffer."""
    device: str = ""
    """Torch device of this worker's policy; empty: as the fleet's options say."""
    raises: bool = False
    """Exceptions of an environment, and actions outside its space, end the fleet; otherwise the environment or the
    worker is restarted."""
    shares_policy: bool = False
    """The policy is the learner's own, in the learner's process: it is called as it is, not compiled."""

    def to_bytes(self) -> bytes:
        try:
            data: bytes = cloudpickle.dumps(self)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            raise ManifestError(
                f"cannot send the environment makers and the policy to worker processes: {error}; create that object "
                "in a function that the worker calls (policy_factory, or the environment maker)"
            ) from error
        return data


NO_OVERRIDES = WorkerOverrides()


def read_overrides(data: bytes) -> WorkerOverrides:
    """Load what `to_bytes` wrote. Empty bytes mean no overrides."""
    if not data:
        return NO_OVERRIDES
    try:
        overrides: WorkerOverrides = cloudpickle.loads(data)
    except Exception as error:  # whatever the user's own modules raise when they are imported
        raise ManifestError(
            f"the worker cannot load the script's objects: {type(error).__name__}: {error}; put the script's modules "
            "on the worker's PYTHONPATH"
        ) from error
    return overrides
