"""`cormorant pause` and `cormorant resume`: let a running fleet stand still, and go on.

A job of a cluster is paused in its spec: that survives a restart of its head, everybody sees it, and it needs no head.
A lease, which ends by itself, is held in the head alone: that is what --owner and --ttl ask for, and what --url gets.
"""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cormorant_cli.connection import Connection, Context, Job, Namespace, Token, TokenFile, Url
from cormorant_cli.errors import BadInput, CommandFailed, HeadAway, NoHead, NotAllowed

if TYPE_CHECKING:
    from cormorant_cli.cluster import Cluster, Raw
    from cormorant_contract.rest.pauses import Pauses

Owner = Annotated[str, typer.Option("--owner", help="Whose lease; each owner holds one. A head of --url: default.")]
_OWNER, _TTL_S = "default", 3600.0
_POLL_S = 0.3


def pause(
    job: Job = "",
    namespace: Namespace = "",
    context: Context = "",
    owner: Owner = "",
    reason: Annotated[str, typer.Option(help="Of a lease, for others to read.")] = "",
    ttl: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds after which a lease ends by itself. A head of --url: 3600.")
    ] = 0.0,
    wait: Annotated[float, typer.Option(min=0, max=300, help="Seconds to wait until all stand still.")] = 30.0,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
) -> None:
    """Let all workers stop stepping. They keep everything, and go on at `cormorant resume`.

    A job's spec.paused is set; with --owner or --ttl, and with --url, its head gives a lease instead, which ends by
    itself. Ends with 1 when the workers do not stand still in time; the pause holds all the same.
    """
    connection = Connection(url=url, token=token, token_file=token_file, job=job, namespace=namespace, context=context)
    if job and not (owner or ttl):
        if reason:
            raise BadInput("--reason is of a lease; give --ttl or --owner with it")
        _set_paused(connection, is_paused=True, wait_s=wait)
        return
    name = owner or _OWNER
    with connection.client("write") as client:
        lease = client.pause(owner=name, reason=reason, ttl=ttl or _TTL_S, wait=wait).lease
    until = lease.expires_at.astimezone().strftime("%H:%M:%S")
    if lease.state != "paused" and wait:
        raise CommandFailed(f"asked to pause until {until} for {name}, and the fleet is {lease.state} after {wait:g} s")
    typer.echo(f"{lease.state} until {until} for {name}; `{connection.command('resume')} --owner {name}` ends it")


def resume(
    job: Job = "",
    namespace: Namespace = "",
    context: Context = "",
    owner: Owner = "",
    wait: Annotated[float, typer.Option(min=0, max=300, help="Of a job: seconds to wait until it goes on.")] = 30.0,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
) -> None:
    """End a pause: a job's spec.paused, or with --owner and with --url a lease. Others may hold theirs."""
    connection = Connection(url=url, token=token, token_file=token_file, job=job, namespace=namespace, context=context)
    if job and not owner:
        _set_paused(connection, is_paused=False, wait_s=wait)
        return
    with connection.client("write") as client:
        left = client.resume(owner or _OWNER)
    typer.echo(_holders(left, connection) or "resumed")


def _set_paused(connection: Connection, *, is_paused: bool, wait_s: float) -> None:
    """Write spec.paused, and wait until the fleet is there."""
    from cormorant_cli.cluster import connected
    from cormorant_cli.jobs import identity

    with connected(connection.context) as cluster:
        namespace = connection.namespace or cluster.namespace
        job = cluster.patch("CollectorJob", connection.job, {"spec": {"paused": is_paused}}, namespace=namespace)
        word = "paused" if is_paused else "resumed"
        if not wait_s:
            typer.echo(f"{identity(job)}: {word}")
            return
        try:
            left = _wait(connection, cluster, job, is_paused=is_paused, wait_s=wait_s)
        except NoHead as error:
            typer.echo(f"{identity(job)}: {word}; {error}")
            return
        except (NotAllowed, HeadAway) as error:
            typer.echo(f"{identity(job)}: {word} in its spec; whether its workers know is not known: {error}", err=True)
            return
    if left.spec_paused == is_paused and (left.state == "paused" or not is_paused):
        held = _holders(left, connection) if left.leases else ""
        typer.echo(f"{identity(job)}: {held or word}")
        return
    if left.spec_paused != is_paused:
        raise CommandFailed(
            f"{identity(job)}: spec.paused is {str(is_paused).lower()}, and its head has not heard of it after "
            f"{wait_s:g} s; is the operator running (`cormorant doctor{cluster.options_of(job)}`)?"
        )
    raise CommandFailed(
        f"{identity(job)}: spec.paused is set, and the fleet is {left.state} after {wait_s:g} s{_after(left.error)}"
    )


def _wait(connection: Connection, cluster: "Cluster", job: "Raw", *, is_paused: bool, wait_s: float) -> "Pauses":
    """What the head says of its pauses when it has heard of the spec, or in the end."""
    deadline = time.monotonic() + wait_s
    with connection.client_in(cluster, job, "read") as client:
        while True:
            found = client.pauses()
            is_there = found.spec_paused == is_paused and found.state == ("paused" if is_paused else found.state)
            if is_there or time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_S)


def _holders(left: "Pauses", connection: Connection) -> str:
    """Who still pauses, as a sentence; empty when nobody does."""
    resume = connection.command("resume")
    spec = f"the job's spec.paused (`{resume if connection.job else 'cormorant resume JOB'}` ends it)"
    owners = [*(lease.owner for lease in left.leases), *([spec] if left.spec_paused else [])]
    if not owners:
        return ""
    ends = "".join(f"; `{resume} --owner {lease.owner}` ends one" for lease in left.leases[:1])
    return f"still {left.state}: {', '.join(owners)}{ends}"


def _after(text: str) -> str:
    return f": {text}" if text else ""
