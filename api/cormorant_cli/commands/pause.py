"""`cormorant pause` and `cormorant resume`: pause a running fleet, and continue it. `cormorant state save | load`: the
whole fleet at a batch boundary, in a file.

A job in a cluster is paused in its spec, which survives head restarts, is visible to every user, and needs no head. A
lease, which expires, exists only in the head: --owner, --ttl and --url take one.
"""

from pathlib import Path
from typing import Annotated

import typer

from cormorant_cli.commands.weights import write_whole
from cormorant_cli.connection import Connection, with_connection
from cormorant_cli.errors import BadInput
from cormorant_cli.printing import refuse_options, size_of, tell, told_when_slow

Owner = Annotated[
    str,
    typer.Option(
        "--owner", help="Owner of the pause lease; each owner holds at most one (default with --url: default)."
    ),
]
_OWNER, _TTL_S = "default", 3600.0
_OF_HEADS = ("token", "token_file", "ca_file")
"""Options that a change of the job's spec does not need."""


@with_connection
def pause(
    connection: Connection,
    owner: Owner = "",
    reason: Annotated[str, typer.Option(help="Reason for the pause lease, shown to others.")] = "",
    ttl: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds after which the lease expires (default with --url: 3600).")
    ] = 0.0,
    wait: Annotated[float, typer.Option(min=0, max=300, help="With a lease: seconds to wait for the workers.")] = 30.0,
) -> None:
    """Pause all workers. They keep their state and continue after `cormorant resume`.

    Sets the job's spec.paused; `cormorant status` shows when the workers obey. With --owner, --ttl or --url it takes a
    pause lease from the head instead, which expires, and exits with 1 if the workers are not paused in time.
    """
    if connection.job and not (owner or ttl):
        refuse_options("reason", "wait", *_OF_HEADS, why="without a pause lease; give --ttl or --owner as well")
        _set_paused(connection, is_paused=True)
        return
    name = owner or _OWNER
    with connection.client("write") as client, told_when_slow(f"until all workers are paused, at most {wait:g} s"):
        lease = client.pause(owner=name, reason=reason, ttl=ttl or _TTL_S, wait=wait).lease
    until = lease.expires_at.astimezone().strftime("%H:%M:%S")
    ends = f"`{connection.command('resume')} --owner {name}` ends it"
    tell({"lease": lease}, f"{lease.state} until {until} for {name}; {ends}")


@with_connection
def resume(connection: Connection, owner: Owner = "") -> None:
    """End a pause: the job's spec.paused, or a pause lease with --owner or --url. Leases of other owners stay."""
    if connection.job and not owner:
        refuse_options(*_OF_HEADS, why="on the job's spec.paused; give --owner for a pause lease")
        _set_paused(connection, is_paused=False)
        return
    with connection.client("write") as client:
        left = client.resume(owner or _OWNER)
    command = connection.command("resume")
    spec = f"the job's spec.paused (`{command if connection.job else 'cormorant resume JOB'}` ends it)"
    owners = [*(lease.owner for lease in left.leases), *([spec] if left.spec_paused else [])]
    ends = "".join(f"; `{command} --owner {lease.owner}` ends one" for lease in left.leases[:1])
    tell(left, f"still {left.state}: {', '.join(owners)}{ends}" if owners else "resumed")


def _set_paused(connection: Connection, *, is_paused: bool) -> None:
    from cormorant_cli.cluster import connected, identity

    with connected(connection.context) as cluster:
        namespace = connection.namespace or cluster.namespace
        job = cluster.patch("CollectorJob", connection.job, {"spec": {"paused": is_paused}}, namespace=namespace)
    obey = f"`{connection.command('status')}` shows when its workers {'are paused' if is_paused else 'run again'}"
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
