"""What to install where an import fails."""

from collections.abc import Iterator
from contextlib import contextmanager


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
        raise ImportError(
            f"this part of cormorant needs {error.name}, which is not installed: pip install 'cormorant[{extra}]'",
            name=error.name,
        ) from error
