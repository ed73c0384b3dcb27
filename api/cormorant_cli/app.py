"""The `cormorant` command, assembled from the modules of `commands`.

A command's module imports typer, the contract and the standard library; heavy packages (torch, EnvPool, the worker) are
imported in the body of the command. So `cormorant validate` starts at once, and help needs no worker installed.
"""

from typing import Annotated

import typer

from cormorant_cli.commands import (
    dataset,
    doctor,
    evaluate,
    init,
    pause,
    reference,
    run,
    status,
    submit,
    validate,
    weights,
)
from cormorant_cli.printing import with_json


def _examples(*commands: str) -> str:
    return "\n\n".join(("Examples:", *commands))


_HERE, _CLUSTER, _HEAD, _REFERENCE = "On this machine", "On a cluster", "A running head", "Reference"

app = typer.Typer(
    name="cormorant",
    help="Collect reinforcement-learning experience from one CollectorJob manifest, on this machine or on Kubernetes.",
    epilog="Start here: cormorant init, then cormorant run job.yaml. Every command has --help.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel=_HERE)(init.init)
app.command(
    rich_help_panel=_HERE,
    epilog=_examples(
        "cormorant run job.yaml",
        "cormorant run job.yaml --serve --directory head",
        "cormorant run job.yaml --workers 4 --frames 100000",
    ),
)(run.run)
app.command(
    rich_help_panel=_HERE,
    epilog=_examples(
        "cormorant evaluate job.yaml --weights policy.safetensors --episodes 100 --seed 1",
        "cormorant evaluate job.yaml --weights a.safetensors --weights b.safetensors --output results",
        "cormorant evaluate pong-evaluation -n rl --wait 600",
    ),
)(evaluate.evaluate)
app.command(
    rich_help_panel=_HERE, epilog=_examples("cormorant validate job.yaml", "cormorant validate examples/*.yaml")
)(validate.validate)
app.add_typer(dataset.app, rich_help_panel=_HERE)
app.command(rich_help_panel=_CLUSTER, epilog=_examples("cormorant submit job.yaml --code . -n rl --wait"))(
    submit.submit
)
app.command(rich_help_panel=_CLUSTER, epilog=_examples("cormorant doctor pong -n rl"))(doctor.doctor)
app.command(rich_help_panel=_HEAD, epilog=_examples("cormorant status pong -n rl --watch"))(status.status)
app.command(rich_help_panel=_HEAD, epilog=_examples("cormorant report pong -n rl --out pong.html"))(status.report)
app.add_typer(weights.app, rich_help_panel=_HEAD)
app.command(rich_help_panel=_HEAD, epilog=_examples("cormorant pause pong -n rl"))(pause.pause)
app.command(rich_help_panel=_HEAD)(pause.resume)
app.add_typer(pause.state, rich_help_panel=_HEAD)
app.command(rich_help_panel=_REFERENCE)(reference.crd)
app.command(rich_help_panel=_REFERENCE)(reference.openapi)
app.command(rich_help_panel=_REFERENCE)(reference.version)
for _group in (app, dataset.app, pause.state, weights.app):
    for _command in _group.registered_commands:
        if _command.callback is not None:
            _command.callback = with_json(_command.callback)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        reference.version()
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Global options."""
