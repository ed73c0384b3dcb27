"""The public name of the TorchRL compatibility layer; the code is in `compat/torchrl/`."""

from typing import TYPE_CHECKING, Any

from cormorant_worker.compat import torchrl as _layer

if TYPE_CHECKING:
    from cormorant_worker.compat.torchrl import *  # noqa: F403 - the layer's `__all__` lists the names

__all__ = _layer.__all__


def __getattr__(name: str) -> Any:
    # On first use: the layer imports Ray and TorchRL only for the classes that need them.
    return getattr(_layer, name)
