"""`cormorant version`: what is installed here."""

from importlib import metadata

import typer

from cormorant_cli.errors import CommandFailed


def version() -> None:
    """Print the version of Cormorant."""
    try:
        typer.echo(f"cormorant {metadata.version('cormorant')}")
    except metadata.PackageNotFoundError:
        raise CommandFailed("cormorant is not installed; install it with: pip install -e .") from None
