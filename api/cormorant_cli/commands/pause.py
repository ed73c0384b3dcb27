"""`cormorant pause` and `cormorant resume`: pause a running fleet, and continue it. `cormorant state save | load`: the
whole fleet at a batch boundary, in a file.

A job in a cluster is paused in its spec, which survives head restarts, is visible to every user, and needs no head. A
head that is named by --url gives a lease, which expires.
"""

from pathlib import Path
from typing import Annotated

import typer

from cormorant_cli.commands.weights import write_whole
from cormorant_cli.connection import Connection, with_connection
from cormorant_cli.errors import BadInput
from cormorant_cli.printing import size_of, tell, told_when_slow

_OWNER, _TTL_S, _WAIT_S = "default", 3600.0, 30.0


@with_connection
def pause(connection: Connection) -> None:
    """Pause all workers. They keep their state and continue after `cormorant resume`.

    Sets the job's spec.paused; `cormorant status` shows when the workers obey. With --url it takes a pause lease from
    the head instead, which expires after an hour, and exits with 1 if the workers are not paused within 30 s.
    """
    if connection.job:
        _set_paused(connection, is_paused=True)
        return
    with connection.client("write") as client, told_when_slow(f"until all workers are paused, at most {_WAIT_S:g} s"):
        lease = client.pause(owner=_OWNER, ttl=_TTL_S, wait=_WAIT_S).lease
    until = lease.expires_at.astimezone().strftime("%H:%M:%S")
    tell({"lease": lease}, f"{lease.state} until {until}; `cormorant resume --url {connection.url}` ends it")


@with_connection
def resume(connection: Connection) -> None:
    """End a pause: the job's spec.paused, or with --url the lease of `cormorant pause`. Other leases stay."""
    if connection.job:
        _set_paused(connection, is_paused=False)
        return
    with connection.client("write") as client:
        left = client.resume(_OWNER)
    owners = [*(lease.owner for lease in left.leases), *(["the job's spec.paused"] if left.spec_paused else [])]
    tell(left, f"still {left.state}: {', '.join(owners)}" if owners else "resumed")


def _set_paused(connection: Connection, *, is_paused: bool) -> None:
    from cormorant_cli.cluster import connected, identity

    with connected(connection.context) as cluster:
        namespace = connection.namespace or cluster.namespace
        job = cluster.patch("CollectorJob", connection.job, {"spec": {"paused": is_paused}}, namespace=namespace)
    status = f"cormorant status {connection.job}{cluster.options_of(job)}"
    obey = f"`{status}` shows when its workers {'are paused' if is_paused else 'run again'}"
    document = {"job": identity(job), "spec_paused": is_paused}
    tell(document, f"{identity(job)}: spec.paused is {str(is_paused).lower()}; {obey}")


state = typer.Typer(
    name="state",
    help="Save and restore the state of a running fleet.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@state.command()
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


@state.command()
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
