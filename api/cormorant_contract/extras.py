"""What to install where an import fails."""

from collections.abc import Iterator
from contextlib import contextmanager


def missing_library(error: ModuleNotFoundError, extra: str, *, what: str) -> str:
    """The sentence that says what to install."""
    return f"{what} needs {error.name}, which is not installed: pip install 'cormorant[{extra}]'"


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Inside, a library that is not installed becomes a sentence that names the extra.

    Raises:
        ImportError: as above.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("cormorant"):
            raise
        raise ImportError(missing_library(error, extra, what="this part of cormorant"), name=error.name) from error
