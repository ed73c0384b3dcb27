"""`cormorant openapi`: the REST API's document, for code generators and for reading. Imports the head, in its body."""

import json

import typer

from cormorant_cli.errors import installed


def openapi() -> None:
    """Print the OpenAPI document of the head's REST API as JSON."""
    with installed("api"):
        from cormorant_api.app import make_app
    typer.echo(json.dumps(make_app().openapi(), indent=2))
