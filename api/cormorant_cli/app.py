"""The `cormorant` command: one module a command, put together here.

A command's module imports typer, the contract and the standard library; what is heavy (torch, EnvPool, the worker) it
imports in the body of the command. So `cormorant validate` starts in a blink, and help needs no worker installed.
"""

import typer

from cormorant_cli import (
    batches,
    crd,
    dataset,
    delete,
    describe,
    doctor,
    envs,
    get,
    logs,
    openapi,
    pause,
    run,
    scale,
    state,
    status,
    submit,
    top,
    validate,
    version,
    weights,
)

app = typer.Typer(
    name="cormorant",
    help="Collects reinforcement-learning experience: one CollectorJob manifest, on this machine or on Kubernetes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(run.run)
app.command()(validate.validate)
app.command()(envs.envs)
app.add_typer(dataset.app)
app.command()(submit.submit)
app.command()(get.get)
app.command()(describe.describe)
app.command()(status.status)
app.command()(top.top)
app.command()(logs.logs)
app.command()(scale.scale)
app.add_typer(weights.app)
app.command()(pause.pause)
app.command()(pause.resume)
app.add_typer(state.app)
app.add_typer(batches.app)
app.command()(delete.delete)
app.command()(doctor.doctor)
app.command()(crd.crd)
app.command()(openapi.openapi)
app.command()(version.version)
