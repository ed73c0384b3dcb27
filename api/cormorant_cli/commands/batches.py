"""`cormorant batches tail`: what comes out of a running head, a line a batch."""

import json
from typing import Annotated

import typer

from cormorant_cli.connection import AsJson, Connection, with_connection

app = typer.Typer(name="batches", help="Read batches from a head.", no_args_is_help=True, rich_markup_mode="markdown")


@app.command()
@with_connection
def tail(
    connection: Connection,
    count: Annotated[int, typer.Option("--count", min=0, help="Stop after this many batches (0: no limit).")] = 0,
    frames: Annotated[
        int, typer.Option(min=0, help="Stop after at least this many frames (0: until the stream ends).")
    ] = 0,
    consumer: Annotated[str, typer.Option(help="Consumer name under which the head counts these batches.")] = "cli",
    as_json: AsJson = False,
) -> None:
    """Take batches and print one line for each. A learner does not get the batches taken here."""
    with connection.client("read") as client:
        # No prefetch: a batch that is not printed stays with the head.
        stream = client.batches(frames or None, consumer=consumer, prefetch=0)
        with stream:
            for number, batch in enumerate(stream, start=1):
                reward = batch.numpy()["next"]["reward"]
                shown = {
                    "id": batch.id,
                    "frames": batch.num_frames,
                    "min_version": batch.min_version,
                    "max_version": batch.max_version,
                    "delivery": batch.delivery,
                    "workers": [part.worker for part in batch.parts],
                    "mean_reward": float(reward.sum() / batch.num_frames),
                }
                typer.echo(json.dumps(shown) if as_json else _line(shown))
                if number == count:
                    break


def _line(shown: dict[str, object]) -> str:
    again = f"  delivery {shown['delivery']}" if shown["delivery"] != 1 else ""
    workers = ",".join(map(str, shown["workers"] if isinstance(shown["workers"], list) else ()))
    return (
        f"{shown['id']}  {shown['frames']} frames  versions {shown['min_version']}..{shown['max_version']}  "
        f"mean reward {shown['mean_reward']:.3f}  {workers}{again}"
    )
