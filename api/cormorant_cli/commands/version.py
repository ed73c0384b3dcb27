"""`cormorant version`: what is installed here."""

from importlib import metadata

from cormorant_cli.errors import CommandFailed
from cormorant_cli.printing import tell


def version() -> None:
    """Print the version of Cormorant."""
    try:
        found = metadata.version("cormorant")
    except metadata.PackageNotFoundError:
        raise CommandFailed("cormorant is not installed; install it with: pip install -e .") from None
    tell({"version": found}, f"cormorant {found}")
