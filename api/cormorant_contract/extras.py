"""Names the extra to install when an import fails."""

from collections.abc import Iterator
from contextlib import contextmanager


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
