"""`cormorant pause` and `cormorant resume`: let a running fleet stand still, and go on."""

from typing import Annotated

import typer

from cormorant_cli.connection import Connection, Token, TokenFile, Url
from cormorant_cli.errors import CommandFailed

Owner = Annotated[str, typer.Option("--owner", help="Who pauses; each owner holds one lease.")]


def pause(
    owner: Owner = "default",
    reason: Annotated[str, typer.Option(help="For others to read.")] = "",
    ttl: Annotated[float, typer.Option(min=1, max=86400, help="Seconds after which it ends by itself.")] = 3600.0,
    wait: Annotated[float, typer.Option(min=0, max=300, help="Seconds to wait until all stand still.")] = 30.0,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
) -> None:
    """Let all workers stop stepping. They keep everything, and go on at `cormorant resume`.

    Ends with 1 when they do not stand still in time; the pause holds all the same.
    """
    with Connection(url=url, token=token, token_file=token_file).client("write") as client:
        lease = client.pause(owner=owner, reason=reason, ttl=ttl, wait=wait).lease
    until = lease.expires_at.astimezone().strftime("%H:%M:%S")
    if lease.state != "paused" and wait:
        raise CommandFailed(
            f"asked to pause until {until} for {owner}, and the fleet is {lease.state} after {wait:g} s"
        )
    typer.echo(f"{lease.state} until {until} for {owner}; `cormorant resume --owner {owner}` ends it")


def resume(owner: Owner = "default", url: Url = "", token: Token = "", token_file: TokenFile = "") -> None:
    """End an owner's pause. The fleet goes on when nobody else holds one."""
    with Connection(url=url, token=token, token_file=token_file).client("write") as client:
        left = client.resume(owner)
    holders = [lease.owner for lease in left.leases] + (["the job's spec.paused"] if left.spec_paused else [])
    typer.echo(f"still {left.state}: {', '.join(holders)}" if holders else "resumed")
