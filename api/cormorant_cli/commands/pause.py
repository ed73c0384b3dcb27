"""`cormorant pause` and `cormorant resume`: pause a running fleet, and continue it.

A job in a cluster is paused in its spec, which survives head restarts, is visible to every user, and needs no head. A
lease, which expires, exists only in the head: --owner, --ttl and --url take one.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from cormorant_cli.connection import Connection, with_connection
from cormorant_cli.errors import BadInput
from cormorant_cli.printing import tell, told_when_slow

if TYPE_CHECKING:
    from cormorant_contract.rest.control import Pauses

Owner = Annotated[
    str,
    typer.Option(
        "--owner", help="Owner of the pause lease; each owner holds at most one (default with --url: default)."
    ),
]
_OWNER, _TTL_S = "default", 3600.0


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
        if reason:
            raise BadInput("--reason belongs to a pause lease; give --ttl or --owner as well")
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
        _set_paused(connection, is_paused=False)
        return
    with connection.client("write") as client:
        left = client.resume(owner or _OWNER)
    tell(left, _holders(left, connection) or "resumed")


def _set_paused(connection: Connection, *, is_paused: bool) -> None:
    from cormorant_cli.cluster import connected, identity

    with connected(connection.context) as cluster:
        namespace = connection.namespace or cluster.namespace
        job = cluster.patch("CollectorJob", connection.job, {"spec": {"paused": is_paused}}, namespace=namespace)
    obey = f"`{connection.command('status')}` shows when its workers {'are paused' if is_paused else 'run again'}"
    document = {"job": identity(job), "spec_paused": is_paused}
    tell(document, f"{identity(job)}: spec.paused is {str(is_paused).lower()}; {obey}")


def _holders(left: "Pauses", connection: Connection) -> str:
    resume = connection.command("resume")
    spec = f"the job's spec.paused (`{resume if connection.job else 'cormorant resume JOB'}` ends it)"
    owners = [*(lease.owner for lease in left.leases), *([spec] if left.spec_paused else [])]
    if not owners:
        return ""
    ends = "".join(f"; `{resume} --owner {lease.owner}` ends one" for lease in left.leases[:1])
    return f"still {left.state}: {', '.join(owners)}{ends}"
