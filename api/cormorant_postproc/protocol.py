"""What every post-processing is: a callable from batch to batch; and how it refuses one."""

from typing import Protocol

from tensordict import TensorDict, TensorDictBase


class PostprocError(ValueError):
    """The batch, or an argument, does not fit; says what was found and what to do."""


class Postproc(Protocol):
    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Take a batch `[*, T]` and return another one; the batch itself stays as it is."""
