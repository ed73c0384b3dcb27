"""`cormorant pause` and `cormorant resume`: pause a running fleet, and continue it.

A job in a cluster is paused in its spec, which survives head restarts, is visible to every user, and needs no head. A
lease, which expires, exists only in the head: --owner, --ttl and --url take one.
"""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cormorant_cli.connection import TIMEOUT_S, Connection, with_connection
from cormorant_cli.errors import BadInput, CommandFailed, NoHead
from cormorant_cli.printing import tell, told_when_slow

if TYPE_CHECKING:
    from cormorant_cli.cluster import Cluster, Raw
    from cormorant_contract.rest.pauses import Pauses

Owner = Annotated[
    str,
    typer.Option(
        "--owner", help="Owner of the pause lease; each owner holds at most one (default with --url: default)."
    ),
]
_OWNER, _TTL_S = "default", 3600.0
_POLL_S = 0.3


@with_connection
def pause(
    connection: Connection,
    owner: Owner = "",
    reason: Annotated[str, typer.Option(help="Reason for the pause lease, shown to others.")] = "",
    ttl: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds after which the lease expires (default with --url: 3600).")
    ] = 0.0,
    wait: Annotated[float, typer.Option(min=0, max=300, help="Seconds to wait until all workers are paused.")] = 30.0,
) -> None:
    """Pause all workers. They keep their state and continue after `cormorant resume`.

    Sets the job's spec.paused. With --owner, --ttl or --url it takes a pause lease from the head instead, which
    expires. Exits with 1 if the workers are not paused in time or cannot be checked; the pause stays in effect.
    """
    if connection.job and not (owner or ttl):
        if reason:
            raise BadInput("--reason belongs to a pause lease; give --ttl or --owner as well")
        _set_paused(connection, is_paused=True, wait_s=wait)
        return
    name = owner or _OWNER
    with connection.client("write") as client, told_when_slow(f"until all workers are paused, at most {wait:g} s"):
        lease = client.pause(owner=name, reason=reason, ttl=ttl or _TTL_S, wait=wait).lease
    until = lease.expires_at.astimezone().strftime("%H:%M:%S")
    ends = f"`{connection.command('resume')} --owner {name}` ends it"
    tell({"lease": lease}, f"{lease.state} until {until} for {name}; {ends}")


@with_connection
def resume(
    connection: Connection,
    owner: Owner = "",
    wait: Annotated[float, typer.Option(min=0, max=300, help="Seconds to wait until the job runs again.")] = 30.0,
) -> None:
    """End a pause: the job's spec.paused, or a pause lease with --owner or --url. Leases of other owners stay.

    Exits with 1 if the workers do not run again in time or cannot be checked.
    """
    if connection.job and not owner:
        _set_paused(connection, is_paused=False, wait_s=wait)
        return
    with connection.client("write") as client:
        left = client.resume(owner or _OWNER)
    tell(left, _holders(left, connection) or "resumed")


def _set_paused(connection: Connection, *, is_paused: bool, wait_s: float) -> None:
    from cormorant_cli.cluster import connected, identity

    with connected(connection.context) as cluster:
        namespace = connection.namespace or cluster.namespace
        job = cluster.patch("CollectorJob", connection.job, {"spec": {"paused": is_paused}}, namespace=namespace)
        word = "paused" if is_paused else "resumed"
        document = {"job": identity(job), "spec_paused": is_paused}
        if not wait_s:
            tell(document, f"{identity(job)}: {word}")
            return
        goal = f"the workers of {identity(job)} {'are paused' if is_paused else 'run again'}"
        try:
            with told_when_slow(f"until {goal}, at most {wait_s:g} s"):
                left = _wait(connection, cluster, job, is_paused=is_paused, wait_s=wait_s)
        except NoHead as error:
            tell(document, f"{identity(job)}: {word}; {error}")
            return
        except CommandFailed as error:
            raise CommandFailed(
                f"{identity(job)}: {word} in its spec, but its workers could not be checked: {error}; with --wait 0 "
                "they are not checked"
            ) from error
    if is_reached(left, is_paused=is_paused):
        held = _holders(left, connection) if left.leases else ""
        tell(document | left.model_dump(mode="json"), f"{identity(job)}: {held or word}")
        return
    if left.spec_paused != is_paused:
        raise CommandFailed(
            f"{identity(job)}: spec.paused is {str(is_paused).lower()}, but its head has not received it after "
            f"{wait_s:g} s; is the operator running (`cormorant doctor{cluster.options_of(job)}`)?"
        )
    raise CommandFailed(
        f"{identity(job)}: spec.paused is {str(is_paused).lower()}, but the fleet is still {left.state} after "
        f"{wait_s:g} s" + (f": {left.error}" if left.error else "")
    )


def _wait(connection: Connection, cluster: "Cluster", job: "Raw", *, is_paused: bool, wait_s: float) -> "Pauses":
    """The head's pauses once they match the spec, or at the deadline."""
    deadline = time.monotonic() + wait_s
    # One request to a stopped head may not exceed the total time.
    with connection.client_in(cluster, job, "read", timeout_s=min(wait_s, TIMEOUT_S)) as client:
        while True:
            found = client.pauses()
            if is_reached(found, is_paused=is_paused) or time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_S)


def is_reached(found: "Pauses", *, is_paused: bool) -> bool:
    """Whether the fleet matches the job's spec. After a resume, leases of other owners may keep it paused."""
    goal = found.state == "paused" if is_paused else found.state == "running" or bool(found.leases)
    return found.spec_paused == is_paused and goal


def _holders(left: "Pauses", connection: Connection) -> str:
    resume = connection.command("resume")
    spec = f"the job's spec.paused (`{resume if connection.job else 'cormorant resume JOB'}` ends it)"
    owners = [*(lease.owner for lease in left.leases), *([spec] if left.spec_paused else [])]
    if not owners:
        return ""
    ends = "".join(f"; `{resume} --owner {lease.owner}` ends one" for lease in left.leases[:1])
    return f"still {left.state}: {', '.join(owners)}{ends}"
