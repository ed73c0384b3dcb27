"""`cormorant status [--watch]`: a running job at a glance. `cormorant report`: its live page and data, in one file."""

import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cormorant_cli.commands.weights import write_whole
from cormorant_cli.connection import Connection, with_connection
from cormorant_cli.errors import CliError
from cormorant_cli.printing import RECENT_EPISODES, speaks_json, tell, told_when_slow

if TYPE_CHECKING:
    from cormorant_contract.rest.status import Status

_REFRESH_S = 2.0


@with_connection
def status(
    connection: Connection,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Refresh every two seconds; on a terminal also while a head restarts."),
    ] = False,
) -> None:
    """Show phase, frames, versions, queue and consumers of a running job."""
    if watch and sys.stdout.isatty() and not speaks_json():
        _show_live(connection)
        return
    with connection.client("read") as client:
        while True:
            status = client.status()
            tell(status, _text(status) + ("\n" if watch else ""), indent=None if watch else 2)
            if not watch:
                return
            time.sleep(_REFRESH_S)


def _show_live(connection: Connection) -> None:
    # rich is slow to load, and a pipe does not need it.
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        try:
            for shown, error in follow(connection):
                # Text, so that brackets in others' texts are not markup.
                text = Text(shown, style="dim" if error else "")
                live.update(text.append(f"\n{error}", style="yellow") if error else text, refresh=True)
        except KeyboardInterrupt:
            return  # Ctrl-C ends the watch


def follow(connection: Connection, refresh_s: float = _REFRESH_S) -> Iterator[tuple[str, str]]:
    """Yield the head's state repeatedly, over one connection while it lasts; or why the head does not answer. CliError
    if it never answered: the user must correct a wrong name or token.
    """
    shown = ""
    while True:
        try:
            with connection.client("read") as client:
                while True:
                    shown = _text(client.status())
                    yield shown, ""
                    time.sleep(refresh_s)
        except CliError as error:
            if not shown:
                raise
            yield shown, printable(str(error))
        # A new connection finds the next head, and reads the tokens again.
        time.sleep(refresh_s)


def _text(found: "Status") -> str:
    return "\n".join(map(printable, lines_of(found)))


def printable(line: str) -> str:
    """A line without the control characters of others' texts."""
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
    if found.restarts:
        yield f"  restarts  {found.restarts:,}"
    state = f", {weights.update_state}" if weights.update_state else ""
    yield f"  weights   version {weights.version}{state}, oldest version in use {weights.min_applied_version}"
    behind = f", {queue.waiting - queue.filled} waiting for room" if queue.waiting > queue.filled else ""
    returned = f", {queue.ready} returned" if queue.ready else ""
    if queue.capacity:
        yield f"  queue     {queue.filled} of {queue.capacity}{behind}{returned}, {queue.lent} with learners"
    for consumer in found.consumers:
        yield f"  consumer  {consumer.name}: {consumer.taken:,} taken, {consumer.acked:,} acknowledged"
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
            yield f"  {condition.type}: {condition.message.splitlines()[0]}"


@with_connection
def report(
    connection: Connection,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="HTML file to write (default: JOB-report.html).")
    ] = "",
) -> None:
    """Save a report of a running job: totals, returns, where time went, events and versions, in one HTML file."""
    from cormorant_api.live.report import make_report

    with connection.client("read") as client, told_when_slow("for the head's history"):
        opening = client.opening()
    html = make_report(opening.model_dump_json(), versions={})
    path = Path(out or f"{opening.moment.status.job}-report.html")
    write_whole(path, memoryview(html.encode()))
    tell({"report": str(path)}, f"report: {path}")
