"""`cormorant dataset ls | verify | export`: lists, verifies and converts a durable dataset."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from cormorant_cli.commands.run import translated_errors
from cormorant_cli.errors import BadInput
from cormorant_cli.printing import columns_of, counted, size_of, speaks_json, tell
from cormorant_contract.disk import local_path

app = typer.Typer(
    name="dataset",
    help="Inspect, verify and export durable datasets.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Uri = Annotated[str, typer.Argument(metavar="URI", help="Dataset: a folder, or any URI supported by fsspec.")]


@app.command()
def ls(uri: Uri) -> None:
    """List the part written by each worker attempt."""
    rows: list[dict[str, object]] = []
    lines = [["PART", "FRAMES", "SHARDS", "SIZE", "TRAJECTORIES", "POLICY VERSIONS"]]
    with translated_errors():
        from cormorant_worker.sinks.dataset import existing_dataset

        dataset = existing_dataset(uri)
        parts, description = dataset.parts(), dataset.description
        for part in parts:
            shards, size = len(part.records), sum(record.size_bytes for record in part.records)
            ended = sum(record.ends for record in part.records)
            low = min((record.min_policy_version for record in part.records), default=None)
            high = max((record.max_policy_version for record in part.records), default=None)
            counts = {"frames": part.frames, "shards": shards, "sizeBytes": size, "trajectoriesEnded": ended}
            versions = {"minPolicyVersion": low, "maxPolicyVersion": high}
            rows.append({"part": part.name, **counts, **versions})
            shown = "-" if low is None else f"{low}..{high}"
            lines.append([part.name, f"{part.frames:,}", f"{shards:,}", size_of(size), f"{ended:,}", shown])
    frames = sum(part.frames for part in parts)
    tell(
        {"uri": uri, "job": description.job, "env": dict(description.env), "frames": frames, "parts": rows},
        f"{uri}: {json.dumps(dict(description.env))}",
        columns_of(lines),
        f"{counted(frames, 'frame')} in {counted(len(rows), 'part')}",
    )


@app.command()
def verify(uri: Uri) -> None:
    """Check the digest of every shard and the continuity of every trajectory. Exits with 1 if something is wrong."""
    with translated_errors():
        from cormorant_worker.sinks.verify import verify as check

        report = check(uri)
    if not speaks_json():
        for line in report.problems:
            typer.echo(line, err=True)
    where = f"{counted(report.shards, 'shard')} of {counted(report.parts, 'part')}"
    verdict = f"{uri}: ok, {counted(report.frames, 'frame')} in {where}, {size_of(report.size_bytes)}"
    tell({"valid": report.is_good, **asdict(report)}, *([verdict] if report.is_good else []))
    if not report.is_good:
        raise typer.Exit(1)


@app.command()
def export(
    uri: Uri,
    to: Annotated[Literal["minari", "parquet", "lerobot", "huggingface"], typer.Option("--to", help="The format.")],
    out: Annotated[
        str, typer.Option("--out", help="New folder for the export (default: <URI>-<format> beside the dataset).")
    ] = "",
    fps: Annotated[
        int, typer.Option("--fps", min=1, help="Frames per second, for the timestamps of --to lerobot.")
    ] = 30,
    push: Annotated[
        str, typer.Option("--push", help="Then upload the folder as this dataset of the Hugging Face Hub, USER/NAME.")
    ] = "",
) -> None:
    """Write the dataset as Minari's HDF5, Parquet, LeRobot v3.0, or a folder for the Hugging Face Hub."""
    folder = local_path(out or uri)
    if folder is None:
        what = f"--out {out} is not" if out else f"--out is required because {uri} is not"
        raise BadInput(f"{what} a local folder")
    target = folder if out else Path(f"{folder}-{to}")
    with translated_errors():
        from cormorant_worker.sinks.export import export as write
        from cormorant_worker.sinks.export import push_to_hub

        done = write(uri, target, to=to, fps=fps)
        pushed = push_to_hub(target, push) if push else ""
    tell(
        {**asdict(done), "format": to, "pushed": pushed},
        f"{done.path}: {counted(done.frames, 'frame')}",
        *([f"pushed: {pushed}"] if pushed else []),
    )
