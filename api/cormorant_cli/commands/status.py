"""`cormorant status [--watch]`: a running job at a glance."""

import time
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from cormorant_cli.connection import AsJson, Connection, with_connection
from cormorant_cli.printing import RECENT_EPISODES

if TYPE_CHECKING:
    from cormorant_contract.rest.status import Status


@with_connection
def status(
    connection: Connection,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every --interval seconds.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show phase, frames, versions, queue and consumers of a running job."""
    with connection.client("read") as client:
        while True:
            found = client.status()
            if as_json:
                typer.echo(found.model_dump_json(indent=None if watch else 2))
            else:
                typer.echo("\n".join(map(printable, lines_of(found))))
            if not watch:
                return
            if not as_json:
                typer.echo("")
            time.sleep(interval)


def printable(line: str) -> str:
    """A line with what others wrote, without what a terminal would obey."""
    return "".join(c if unicodedata.category(c) != "Cc" else repr(c)[1:-1] for c in line)


def lines_of(found: "Status") -> Iterator[str]:
    frames, weights, queue = found.frames, found.weights, found.queue
    target = f" of {frames.target:,}" if frames.target is not None else ""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in frames.dropped.items() if count)
    yield f"{found.job}: {found.phase}"
    delivered = f", {frames.delivered:,} delivered" if found.counts == "frames" else ""
    yield f"  {found.counts:<10}{frames.collected:,}{target}, {frames.per_second:,.0f}/s{delivered}"
    if dropped:
        yield f"  dropped   {dropped}"
    for group in found.groups:
        yield f"  workers   {group.name}: {group.ready} of {group.desired} ready"
        if group.policy_call:
            yield f"  policy    {group.name}: {group.policy_call}"
    for name, served in found.inference.items():
        yield (
            f"  servers   {name}: {served.rows_per_second:,.0f} rows/s, {served.rows_per_act:,.1f} rows an act "
            f"({served.padding:.0%} padding), wait {served.wait_ms:.2f} ms, act {served.act_ms:.2f} ms, "
            f"busy {served.busy:.0%}"
        )
    state = f", {weights.update_state}" if weights.update_state else ""
    yield f"  weights   version {weights.version}{state}, oldest version in use {weights.min_applied_version}"
    behind = f", {queue.waiting - queue.filled} waiting for room" if queue.waiting > queue.filled else ""
    returned = f", {queue.ready} returned" if queue.ready else ""
    yield f"  queue     {queue.filled} of {queue.capacity}{behind}{returned}, {queue.lent} with learners"
    for consumer in found.consumers:
        yield f"  consumer  {consumer.name}: {consumer.taken:,} taken, {consumer.acked:,} acknowledged"
    for key, statistics in found.statistics.items():
        yield (
            f"  normalize {key}: {statistics.frames:,} frames, {statistics.published_frames:,} of them published, "
            f"std {statistics.std[0]:.3g} to {statistics.std[1]:.3g}"
        )
    if found.episodes.mean_return is not None:
        last = min(found.episodes.count, RECENT_EPISODES)
        yield f"  episodes  {found.episodes.count:,}, mean return {found.episodes.mean_return:.2f} over the last {last}"
    for name, value in found.episodes.metrics.items():
        yield f"  metric    {name}: {'no number yet' if value is None else f'mean {value:.4g}'}"
    for lease in found.pauses:
        until = lease.expires_at.astimezone().strftime("%H:%M:%S")
        yield f"  paused    by {lease.owner} until {until}{f': {lease.reason}' if lease.reason else ''}"
    for condition in found.conditions:
        if condition.message and (condition.status == "True" or condition.reason.startswith("WaitingFor")):
            yield f"  {condition.type}: {condition.message}"
