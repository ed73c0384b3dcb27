"""Weights from a parent, as TorchRL's collectors take them: schemes with a `receive()`, TorchRL's own or anybody's."""

from collections.abc import Mapping
from typing import Any


class NotSet(AttributeError, RuntimeError):
    """Not set: a RuntimeError, as TorchRL documents, and absent for `getattr` with a default."""


def check_receivers(schemes: Mapping[str, Any]) -> None:
    for model_id, scheme in schemes.items():
        if not callable(getattr(scheme, "receive", None)):
            raise TypeError(f'the scheme of "{model_id}" is a {type(scheme).__name__}, which has no receive()')


def begin(model_id: str, scheme: Any, collector: Any) -> None:
    """Tell a scheme whom it receives for, if it asks."""
    if hasattr(scheme, "init_on_receiver") and not getattr(scheme, "initialized_on_receiver", False):
        scheme.init_on_receiver(model_id=model_id, context=collector)


def connect(scheme: Any) -> bool:
    """Have a scheme meet its sender, if it wants to. True where it did: TorchRL's have written the first weights into
    the collector's policy by then.
    """
    if not hasattr(scheme, "connect") or getattr(scheme, "synchronized_on_receiver", False):
        return False
    scheme.connect()
    return hasattr(scheme, "synchronized_on_receiver")


def end(schemes: Mapping[str, Any]) -> None:
    """End the threads and connections of schemes that have some."""
    for scheme in schemes.values():
        if hasattr(scheme, "shutdown"):
            scheme.shutdown()
