"""`cormorant annotations list | get | put | delete`: what a learner keeps at the head beside the weights."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cormorant_cli.commands.weights import read_whole, write_whole
from cormorant_cli.connection import Connection, with_connection
from cormorant_cli.errors import CommandFailed
from cormorant_cli.printing import size_of

app = typer.Typer(
    name="annotations",
    help="Values that a learner keeps at the head, each for one policy version.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Key = Annotated[str, typer.Argument(metavar="KEY", help="Key of the annotation.")]


@app.command(name="list")
@with_connection
def list_annotations(connection: Connection) -> None:
    """List the keys with the policy version and the size of their newest values."""
    with connection.client("read") as client:
        entries = client.annotations.list()
    for entry in entries:
        when = entry.stored_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        typer.echo(f"{entry.key}  version {entry.version}  {size_of(entry.bytes)}  {when}  {entry.author}")
    if not entries:
        typer.echo("no annotations are stored", err=True)


@app.command()
@with_connection
def get(
    key: Key,
    connection: Connection,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="File to write (default: standard output).")] = "",
    version: Annotated[
        int, typer.Option(min=-1, help="Highest policy version that the value may belong to (-1: any).")
    ] = -1,
) -> None:
    """Write a value to a file or to standard output."""
    with connection.client("read") as client:
        found = client.annotations.get(key, version=version if version >= 0 else None)
    if found is None:
        raise CommandFailed(f"there is no annotation {key}{f' of version {version} or below' if version >= 0 else ''}")
    if out:
        write_whole(Path(out), memoryview(found.value))
        typer.echo(f"{out}: version {found.version} of {key}, {size_of(len(found.value))}")
    else:
        sys.stdout.buffer.write(found.value)


@app.command()
@with_connection
def put(
    key: Key,
    file: Annotated[str, typer.Argument(metavar="FILE", help="File with the value, at most 1 MiB.")],
    connection: Connection,
    version: Annotated[
        int, typer.Option(min=-1, help="Policy version that the value belongs to (-1: the newest published one).")
    ] = -1,
) -> None:
    """Store a file as the value of a key."""
    value = read_whole(file)
    with connection.client("write") as client:
        entry = client.annotations.put(key, value, version=version if version >= 0 else None)
    typer.echo(f"{key}: version {entry.version}, {size_of(entry.bytes)}")


@app.command()
@with_connection
def delete(key: Key, connection: Connection) -> None:
    """Remove every value of a key."""
    with connection.client("write") as client:
        client.annotations.delete(key)
    typer.echo(f"{key}: deleted")
