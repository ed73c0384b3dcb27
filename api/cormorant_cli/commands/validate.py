"""`cormorant validate FILE...`: the API server's verdict on manifests, without an API server."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cormorant_cli.printing import speaks_json, tell
from cormorant_contract.errors import ManifestError, Problem
from cormorant_contract.job import CollectorJob
from cormorant_manifest.entrypoints import missing_entrypoints
from cormorant_manifest.reader import STDIN, load_jobs

Verdict = tuple[Sequence[CollectorJob], Sequence[Problem]]
"""Jobs in one file, or its problems."""


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Manifest files; - reads standard input.")],
    imports: Annotated[
        bool,
        typer.Option(
            "--imports",
            help="Also check gymnasium's ids, and entrypoints and their arguments, without running them.",
        ),
    ] = False,
) -> None:
    """Check CollectorJob manifests and print one line per error. Exits with 0 if all are valid, 2 otherwise."""
    verdicts = {file: judge(file, imports=imports) for file in dict.fromkeys(files)}
    all_problems = [problem for _, problems in verdicts.values() for problem in problems]
    if not speaks_json():
        for problem in all_problems:
            typer.echo(str(problem), err=True)
    passed = [
        ("standard input" if file == STDIN else file, job.metadata.name)
        for file, (jobs, _) in verdicts.items()
        for job in jobs
    ]
    document = {
        "valid": not all_problems,
        "files": [
            {
                "source": file,
                "jobs": [{"namespace": job.metadata.namespace, "name": job.metadata.name} for job in jobs],
                "problems": [
                    {name: getattr(problem, name) for name in ("document", "name", "line", "path", "message")}
                    for problem in problems
                ],
            }
            for file, (jobs, problems) in verdicts.items()
        ],
    }
    tell(document, *(f"{source}: {name}: ok" for source, name in passed))
    if all_problems:
        raise typer.Exit(2)


def judge(file: str, *, imports: bool = False) -> Verdict:
    """Read one file; never raises because of its content."""
    try:
        jobs = load_jobs(file)
    except ManifestError as error:
        return (), error.problems
    if not imports:
        return jobs, ()
    folder = Path(file).resolve().parent  # the working directory with standard input
    problems = [replace(problem, source=file) for job in jobs for problem in missing_entrypoints(job, folder=folder)]
    return ((), problems) if problems else (jobs, ())
