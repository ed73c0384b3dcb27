"""`cormorant state save | load`: the whole fleet at a batch boundary, in a file."""

from pathlib import Path
from typing import Annotated

import typer

from cormorant_cli.commands.weights import write_whole
from cormorant_cli.connection import Connection, with_connection
from cormorant_cli.errors import BadInput
from cormorant_cli.printing import size_of, tell, told_when_slow

app = typer.Typer(
    name="state",
    help="Save and restore the state of a running fleet.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command()
@with_connection
def save(
    out: Annotated[str, typer.Argument(metavar="FILE", help="File to write.")],
    connection: Connection,
) -> None:
    """Save the fleet's state to a file: frame counts, random streams, and environments that can be saved."""
    with connection.client("write") as client, told_when_slow("until every worker is at the end of a batch"):
        data = client.state()
    write_whole(Path(out), data)
    tell({"file": out, "bytes": len(data)}, f"{out}: {size_of(len(data))}")


@app.command()
@with_connection
def load(
    file: Annotated[str, typer.Argument(metavar="FILE", help="File written by `state save`.")],
    connection: Connection,
) -> None:
    """Restore a saved state. The fleet is paused meanwhile, and stays paused if it was."""
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from error
    with connection.client("write") as client, told_when_slow("until the fleet has loaded the state"):
        client.restore(data)
    tell({"file": file, "bytes": len(data)}, f"loaded {file}")
