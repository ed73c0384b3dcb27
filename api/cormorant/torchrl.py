"""TorchRL's collectors and environments on this engine: see `docs/how-to/migrating-from-torchrl.md`."""

from typing import TYPE_CHECKING, Any

from cormorant_compat import torchrl as _layer
from cormorant_contract.errors import needs

if TYPE_CHECKING:
    from cormorant_compat.torchrl import *  # noqa: F403

__all__ = _layer.__all__

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """With TorchRL installed the environments are its `EnvBase`, without it they stand alone."""
        with needs("worker"):
            return getattr(_layer, name)
