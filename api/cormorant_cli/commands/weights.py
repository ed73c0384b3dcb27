"""`cormorant weights init | push | pull | list | rollback`: weights as safetensors files. `init` builds the policy
locally and imports the worker in its body; the others ask a running head.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cormorant_cli.commands.run import logged_to
from cormorant_cli.connection import Connection, with_connection
from cormorant_cli.errors import BadInput, CommandFailed, installed
from cormorant_cli.printing import counted, size_of, tell, told_when_slow
from cormorant_cli.progress import choose_display
from cormorant_contract.disk import write_durably
from cormorant_contract.errors import WeightsError
from cormorant_contract.weights import file_of

if TYPE_CHECKING:
    from cormorant_client import Client, Update

app = typer.Typer(
    name="weights",
    help="Create, publish, fetch and roll back weights.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

ModelName = Annotated[
    str, typer.Option("--model", help="Model name; `push` needs it only if the tensor names in FILE do not tell.")
]
Wait = Annotated[
    float,
    typer.Option("--wait", min=0, help="Seconds to wait until the workers have applied the weights (0: do not wait)."),
]

_HELD = "the job is paused and applies it after resuming"


@app.command()
def init(
    manifest: Annotated[str, typer.Argument(metavar="MANIFEST", help="CollectorJob manifest in YAML.")],
    out: Annotated[str, typer.Argument(metavar="FILE", help="Safetensors file to write.")],
) -> None:
    """Build the policy of a manifest and write its initial weights, the ones its workers start with."""
    # Importing PyTorch and creating the environments takes most of the time, on a busy machine more than a minute.
    with told_when_slow(f"until PyTorch is imported and the environments and the policy of {manifest} are built"):
        with installed("worker"):
            from cormorant_worker.errors import CormorantError
            from cormorant_worker.launch import make_collector
            from cormorant_worker.weights.blob import to_bytes
        try:
            with logged_to(choose_display()), make_collector(manifest) as collector:
                current = collector.weights.current()
        except CormorantError as error:
            raise BadInput(str(error)) from error
    if not current:
        raise BadInput(f"the policy of {manifest} has no weights: it is random or not a torch module")
    data = to_bytes(current)
    write_whole(Path(out), memoryview(data))
    tensors = sum(map(len, current.values()))
    tell(
        {"file": out, "models": list(current), "tensors": tensors, "bytes": len(data)},
        f"{out}: {counted(tensors, 'tensor')} of {', '.join(current)}, {size_of(len(data))}",
    )


@app.command()
@with_connection
def push(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A safetensors file.")],
    connection: Connection,
    model: ModelName = "policy",
    wait: Wait = 30.0,
) -> None:
    """Publish a safetensors file. Exits with 1 if no worker applied it."""
    try:
        data = file_of(file)  # before a head is asked
    except WeightsError as error:
        raise BadInput(str(error)) from error
    assert data is not None
    with connection.client("write") as client:
        update, is_held = _publish(client, wait, lambda: client.publish(data, model=model))
    workers = update.answer.workers
    how = f"; {_HELD}" if is_held else f", {workers.acked} of {workers.total} workers, {update.digest}"
    tell(update.answer, f"version {update.version}: {update.state}{how}")


@app.command()
@with_connection
def pull(
    out: Annotated[str, typer.Argument(metavar="FILE", help="Safetensors file to write.")],
    connection: Connection,
    model: ModelName = "policy",
    version: Annotated[int, typer.Option(min=0, help="Version to fetch (0: the newest).")] = 0,
) -> None:
    """Fetch weights into a file."""
    with connection.client("read") as client:
        pulled = client.weights(model, version=version or None)
    write_whole(Path(out), pulled.data)
    document = {"file": out, "model": model, "version": pulled.version, "bytes": len(pulled.data)}
    tell(document, f"{out}: version {pulled.version} of {model}, {size_of(len(pulled.data))}")


@app.command(name="list")
@with_connection
def list_versions(
    connection: Connection,
    model: Annotated[str, typer.Option("--model", help="Show the retained versions of this model.")] = "",
) -> None:
    """List the models and their newest versions, or the versions of one model."""
    with connection.client("read") as client:
        if not model:
            models = client.models()
            lines = (f"{m.name}  version {m.version}  {size_of(m.bytes)}  {m.digest or '-'}" for m in models.models)
            tell(models, *lines)
            return
        versions = client.versions(model)
    lines = (
        f"{kept.version:>8}  {kept.published_at.astimezone():%Y-%m-%d %H:%M:%S}  {size_of(kept.bytes):>10}  "
        f"{kept.digest}  {kept.author}"
        for kept in versions.versions
    )
    tell(versions, *lines)
    if not versions.versions:
        typer.echo(f"no weights of {model} have been published yet", err=True)


@app.command()
@with_connection
def rollback(
    version: Annotated[int, typer.Argument(metavar="VERSION", help="A retained version.")],
    connection: Connection,
    model: ModelName = "policy",
    wait: Wait = 30.0,
) -> None:
    """Publish an old version's weights again, under a new number."""
    with connection.client("write") as client:
        update, is_held = _publish(client, wait, lambda: client.rollback(version, model=model))
    held = f"; {_HELD}" if is_held else ""
    tell(update.answer, f"version {update.version} has the weights of version {version}: {update.state}{held}")


def _publish(client: "Client", wait_s: float, send: Callable[[], "Update"]) -> tuple["Update", bool]:
    """Publish, and wait until the workers apply it. True if they are paused and will apply it after resuming."""
    # Waiting for paused workers would only time out.
    is_paused = client.status().pause_state != "running"
    update = send()
    if wait_s and not is_paused:
        with told_when_slow(f"until the workers apply version {update.version}, at most {wait_s:g} s"):
            update.wait(wait_s)
    return update, is_paused and update.state != "applied"


def write_whole(path: Path, data: memoryview) -> None:
    """Write a file atomically."""
    try:
        write_durably(path, data)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror or error}") from error
