"""`cormorant openapi`: the REST API's document, for code generators and for reading. Imports the head, in its body."""

import json

import typer

from cormorant_cli.errors import CommandFailed


def openapi() -> None:
    """Print the OpenAPI document of the head's REST API as JSON."""
    try:
        from cormorant_api.app import make_app
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"cormorant openapi needs {error.name}, which is not installed: pip install 'cormorant[api]'"
        ) from error
    typer.echo(json.dumps(make_app().openapi(), indent=2))
